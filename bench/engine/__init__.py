"""The sizes of real models, without SGLang."""
