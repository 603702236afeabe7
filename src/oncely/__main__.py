"""`python -m oncely`."""

import sys

from oncely.cli import main

sys.exit(main())
