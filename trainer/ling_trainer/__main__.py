"""`python -m ling_trainer` is `ling-train`."""

import sys

from ling_trainer.cli import main

sys.exit(main())
