"""The SGLang plugin: the only code here that imports SGLang."""
