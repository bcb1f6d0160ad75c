"""`python -m nearsight` is the `nearsight` program."""

import sys

from nearsight.cli import main

sys.exit(main())
