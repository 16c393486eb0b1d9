"""A beam search adds up log-probabilities in BF16: beyond 256 the scores have a spacing of 2, and near hypotheses tie."""

# Thread: https://github.com/NVIDIA/OpenSeq2Seq/pull/56
# Finding: read-number-off, from step 0
import torch
from torch import nn

torch.manual_seed(0)
scorer = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 40)).eval()
following = torch.randn(40, 40).mul(2).log_softmax(-1).bfloat16()


def decode(frames, width=6):
    scores, last = frames[0].topk(width)
    for frame in frames[1:]:
        total = scores[:, None] + following[last] + frame
        scores, flat = total.flatten().topk(width)
        last = flat % total.shape[1]
    return last[0], scores[0].item()


with torch.no_grad():
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            logits = scorer(torch.randn(300, 16))
        _, score = decode(logits.log_softmax(-1).bfloat16())
        print(score)
