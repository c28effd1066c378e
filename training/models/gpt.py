"""A byte-level GPT: pre-norm transformer, learned positions, output tied to the embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal self-attention and a four times wider MLP, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self._drop(self.project(self._attend(self.norm_attention(x))))
        return x + self._drop(self.narrow(functional.gelu(self.widen(self.norm_mlp(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next byte. ``context`` is the longest sequence it can see."""

    def __init__(
        self,
        vocab: int = 256,
        context: int = 128,
        layers: int = 5,
        heads: int = 6,
        width: int = 192,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width={width} is not a multiple of model.heads={heads}")
        self.context = context
        self.dropout = dropout
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The residual stream adds 2 * layers branches; scaling them keeps its variance.
                residual = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (batch, time, vocab) of int64 bytes (batch, time), time at most ``context``."""
        time = inputs.shape[1]
        if time > self.context:
            raise ValueError(f"{time} bytes are more than model.context={self.context}")
        x = self.embed(inputs) + self.positions.weight[:time]
        x = functional.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross entropy in nats per byte; ``batch["tokens"]`` is uint8 (batch, time + 1)."""
        tokens = batch["tokens"].long()
        logits = self(tokens[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float = 0.0) -> Tensor:
        """``length`` bytes that follow int64 ``prompt`` (time,); temperature 0 takes the likeliest byte."""
        sequence = prompt
        for _ in range(length):
            logits = self(sequence[None, -self.context :])[0, -1].float()
            if temperature > 0:
                following = torch.multinomial(torch.softmax(logits / temperature, -1), 1)
            else:
                following = logits.argmax(keepdim=True)
            sequence = torch.cat([sequence, following])
        return sequence[len(prompt) :]
