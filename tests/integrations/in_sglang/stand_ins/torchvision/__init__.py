"""Only models with images need it, and it must fit torch to the last digit."""

from stand_in import stand_in

__version__ = "0.28.0"
stand_in(__name__)
