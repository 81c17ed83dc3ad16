"""How large a device buffer for a layer's weights is: for those who make them, and for those who
plan with them."""

ALIGNMENT = 256


def slot_bytes(num_bytes: int) -> int:
    """What a slot for so many bytes takes: more by at most a 64th, or by less than `ALIGNMENT`.

    Layers of nearly the same size share slots. A head is hardly larger than the embedding; it is
    the first to be done in a backward, the embedding the last, and the next call wants the
    embedding first. In a slot of its own that would wait, and on the lane every layer behind it.
    """
    step = max(ALIGNMENT, 1 << max(num_bytes.bit_length() - 7, 0))
    return -(-max(num_bytes, 1) // step) * step
