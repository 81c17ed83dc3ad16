"""The example of a CNN trains as the loop that its comments say it was."""

import torch
from torch.nn import functional as F

import resnet


def test_it_trains_as_the_plain_loop() -> None:
    """Batch norm included, because a batch is one microbatch there by default."""
    model, expected = resnet.make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for images, labels in resnet.batches(3, batch_size=8):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = resnet.main(["--devices", "2", "--steps", "3", "--batch_size", "8"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
