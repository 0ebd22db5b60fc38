"""What can a user choose?

Every option is checked when it is given, and frozen from then on.
"""

from .formats import GradientFormat, Master, Precision, Stage, StateFormat
from .keywords import OptionKeywords
from .offload import Offload
from .options import Options, check_norm_group, check_process_group
from .tuning import MIB, Tuning

__all__ = [
    "MIB",
    "GradientFormat",
    "Master",
    "Offload",
    "OptionKeywords",
    "Options",
    "Precision",
    "Stage",
    "StateFormat",
    "Tuning",
    "check_norm_group",
    "check_process_group",
]
