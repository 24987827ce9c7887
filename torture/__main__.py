"""`python -m torture`."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports NumPy or torch: see torture.forked

from torture.parts import main

sys.exit(main())
