"""Flops of one training step of a GPT, as the sources count them: a multiply-add is two, attention counts in full."""


def megatron_flops(sequences: int, length: int, layers: int, hidden: int, vocab: int) -> float:
    """Flops with every layer's forward pass run twice: 96 B s l h^2 (1 + s / 6 h + V / 16 l h).

    Reference: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    (SC 2021), equation 3.
    """
    return 96 * _dense(sequences, length, layers, hidden) * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))


def model_flops(sequences: int, length: int, layers: int, hidden: int, vocab: int) -> float:
    """Flops without recomputation: 72 B s l h^2 (1 + s / 6 h + V / 12 l h).

    Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), equation 7.
    """
    return 72 * _dense(sequences, length, layers, hidden) * (1 + length / (6 * hidden) + vocab / (12 * layers * hidden))


def _dense(sequences: int, length: int, layers: int, hidden: int) -> float:
    return float(sequences * length * layers * hidden**2)
