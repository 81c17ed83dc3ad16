"""How known architectures become a sequence of layers. One file per architecture, found by `preset.cut`."""
