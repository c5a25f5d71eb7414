"""Products with packed weights in NVFP4, emulated."""

from arbcli.families.nvfp4.kernels.round_nvfp4 import round_nvfp4 as round_nvfp4
from arbcli.families.nvfp4.kernels.round_nvfp4 import round_stack_nvfp4 as round_stack_nvfp4
from arbcli.families.nvfp4.kernels.scaled_nvfp4 import nvfp4_product as nvfp4_product
