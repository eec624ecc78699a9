"""`python -m stoker_cli`: the `stoker` command where its script is not on the path."""

import sys

from stoker_cli import main

sys.exit(main())
