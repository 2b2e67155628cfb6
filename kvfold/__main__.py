# SPDX-License-Identifier: Apache-2.0
"""`python -m kvfold`, and `torchrun … -m kvfold`."""

from kvfold.cli import main

main()
