"""SGLang's front end imports names of it; no route that is asked here calls one."""

import absent

__getattr__ = absent.package(__name__)
