"""What lives on the device, and what moves it there: page ids, plans, uploads, views, decode steps."""
