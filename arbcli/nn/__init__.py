"""Integer weights for any module of PyTorch: docs/library.md describes them, with examples."""

from arbcli.nn.convert import PROJECTIONS as PROJECTIONS
from arbcli.nn.convert import floats as floats
from arbcli.nn.convert import to_integers as to_integers
from arbcli.nn.layers import Embedding as Embedding
from arbcli.nn.layers import Experts as Experts
from arbcli.nn.layers import Linear as Linear
from arbcli.nn.layers import Vector as Vector
from arbcli.nn.loop import CapturedStep as CapturedStep
from arbcli.nn.loop import linear_cross_entropy as linear_cross_entropy
from arbcli.nn.optimizer import IntegerOptimizer as IntegerOptimizer
from arbcli.nn.saving import export_float as export_float
from arbcli.nn.saving import float_state_dict as float_state_dict
from arbcli.nn.saving import load_integers as load_integers
from arbcli.nn.storage import Storage as Storage
