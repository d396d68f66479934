"""Transformers asks for it when SGLang registers its processors; no image is ever read here."""

import absent

__version__ = "0.28.0"
__getattr__ = absent.package(__name__)
