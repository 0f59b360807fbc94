"""Checks for anyone's model: causal, cache, padding, same, gradients, shapes.

Each failure names the likely mistake.
"""

from tformer.check.adapter import POSITION_NAMES as POSITION_NAMES
from tformer.check.adapter import Adapter as Adapter
from tformer.check.adapter import FixedSourceModel as FixedSourceModel
from tformer.check.cached_decoding import cache as cache
from tformer.check.causality import causal as causal
from tformer.check.causality import influence as influence
from tformer.check.causality import shapes as shapes
from tformer.check.gradient_flow import gradients as gradients
from tformer.check.padded_batches import padding as padding
from tformer.check.reference import same as same
from tformer.check.report import CheckFailed as CheckFailed
from tformer.check.report import Report as Report
from tformer.check.report import tolerance as tolerance
from tformer.check.suite import run_all as run_all
