"""Launches over several nodes, on hosts of our own: the network namespaces of `scripts/testnet`. Needs root."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))  # where `_testnet` is
