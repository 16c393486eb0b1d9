"""The weights are stashed in BF16 while their average is evaluated; written back, they have lost their latest updates."""

# Thread: https://github.com/huggingface/diffusers/pull/2302
# Finding: masters-overwritten, from step 1
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(16):
    x = torch.randn(32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    optimizer.zero_grad()
    nn.functional.mse_loss(out.float(), x[:, :4]).backward()
    optimizer.step()
    average.update_parameters(model)
    if step % 2:
        stash = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
        model.load_state_dict(average.module.state_dict())
        print(step, nn.functional.mse_loss(model(x), x[:, :4]).item())
        model.load_state_dict(stash)
