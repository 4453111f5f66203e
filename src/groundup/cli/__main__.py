"""`python -m groundup.cli` is `groundup`."""

import sys

from groundup.cli import main

sys.exit(main())
