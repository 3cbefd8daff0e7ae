"""`muonloom train`: a training run of any Transformers causal LM, described by one TOML file."""
