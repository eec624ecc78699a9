"""`python -m stoker_cli`: the `stoker` command without its installed script."""

import sys

from stoker_cli import main

sys.exit(main())
