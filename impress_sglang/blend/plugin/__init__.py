"""What blends need of SGLang: its model, run over single blocks between its passes."""
