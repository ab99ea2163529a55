"""The oracle: plain Python over dicts and sets of page ids. It shares no code with what it checks."""
