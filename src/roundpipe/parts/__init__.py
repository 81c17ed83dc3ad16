"""The parts of a model that is no sequence: which they are, and what joins their engines to the model's own code."""
