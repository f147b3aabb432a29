"""All models of the zoo, by name. Those of Hugging Face need transformers."""

import dataclasses

import huggingface
import plain


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    family: str
    source: str  # "transformers" or "torch"
    what: str  # class or description for the table
    spec: tuple

    def build(self):
        """Module, args, kwargs, dynamic shapes; random numbers are the caller's."""
        return (huggingface if self.source == "transformers" else plain).build(self.spec)


def _all():
    for family, table in plain.MODELS.items():
        for name, spec in table.items():
            yield Entry(f"torch_{name}", family, "torch", name.replace("_", " "), spec)
    for family, table in huggingface.FAMILIES.items():
        for name, spec in table.items():
            yield Entry(name, family, "transformers", spec[0], spec)


ENTRIES = {entry.name: entry for entry in _all()}

# A dozen for every `make test`: one of each kind, the quick ones.
FEW = ("torch_gpt", "torch_gpt_experts", "torch_shared_blocks", "torch_lstm", "torch_resnet", "torch_unet", "torch_statistics",
       "torch_contexts", "llama_tied", "gpt2", "bert", "vit", "mamba", "bart")
