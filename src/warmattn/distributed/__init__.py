"""Context parallel attention over torch.distributed: K and V spread over ranks, the bits of one device."""

from warmattn.distributed.attention import attention
from warmattn.distributed.traffic import Traffic, traffic

__all__ = ["Traffic", "attention", "traffic"]
