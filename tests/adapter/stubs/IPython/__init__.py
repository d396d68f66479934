"""SGLang imports two display helpers that nothing here calls."""

import absent

__version__ = "9.0.0"
__getattr__ = absent.package(__name__)
