"""SGLang 0.5.17 uses one class of it as the type of a pydantic field; no grammar is compiled."""

import absent
from pydantic import BaseModel, ConfigDict


class StructuralTag(BaseModel):
    """Holds whatever it is given."""

    model_config = ConfigDict(extra="allow")


__version__ = "0.2.1"
__getattr__ = absent.package(__name__)
