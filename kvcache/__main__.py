"""`python -m kvcache` is the command `kvcache`."""

import sys

from kvcache.cli import main

sys.exit(main())
