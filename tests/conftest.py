"""Tests run many tiny operations: one thread each, so that workers do not fight over the cores."""

import torch

torch.set_num_threads(1)
