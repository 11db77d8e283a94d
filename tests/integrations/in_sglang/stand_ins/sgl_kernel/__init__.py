"""SGLang's kernels for GPUs: a wheel of 383 MB."""

from stand_in import stand_in

__version__ = "0.4.10"
stand_in(__name__)
