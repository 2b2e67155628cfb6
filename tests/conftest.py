# SPDX-License-Identifier: Apache-2.0
"""One thread, and no chatter from transformers."""

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
