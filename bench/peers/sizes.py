"""The sizes of the GPT of bench/gpt.h, without PyTorch."""

# vocabulary, width, heads, layers, length, batch
CONFIGS = {
    "tiny": (256, 128, 4, 12, 64, 4),
    "124M": (50304, 768, 12, 12, 1024, 8),
    "774M": (50304, 1280, 20, 36, 1024, 8),
}


def flops_a_step(config):
    """Operations of a training step: 6 for each token and parameter that is multiplied, which
    embeddings are not, and 12 * layers * width * length a token for attention, without the saving
    that a causal mask allows."""
    vocabulary, width, _, layers, length, batch = config
    block = 12 * width * width + 13 * width
    multiplied = layers * block + 2 * width + vocabulary * width
    return batch * length * (6 * multiplied + 12 * layers * width * length)
