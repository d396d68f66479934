"""No hooks: SGLang's watch over lazy kernel loads stays off."""

runtime = compilation = None
