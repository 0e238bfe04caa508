"""Prints every parameter that transformers gives the models of the config.json files in argv: FILE NAME DIMENSIONS.

The independent source for the layout tests. Models are built on the meta device: shapes without memory.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

for path in sys.argv[1:]:
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # a tied matrix once
        print(path, name, *parameter.shape)
