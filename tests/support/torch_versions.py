"""What the older versions of torch that the package supports cannot do, so that tests hold each version to what it can."""

import torch
from packaging.version import Version

# Before 2.14 the shape of a pooled map asks whether rows and columns divide: a graph holds for lengths of that parity.
POOLS_ASK_PARITY = Version(torch.__version__).release < (2, 14)
