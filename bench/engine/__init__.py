"""The paper's systems at the sizes of real models, without SGLang."""
