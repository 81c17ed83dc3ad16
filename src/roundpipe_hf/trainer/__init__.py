"""The Trainer itself: its hooks for training, evaluation and saving. Imports every room but
`trl`."""
