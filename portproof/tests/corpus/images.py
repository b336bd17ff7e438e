"""Models whose output is an image, a map or boxes: segmentation, detection, generation."""

import paddle
import torch
from paddle.nn import functional as PF
from torch.nn import functional as TF

from corpus.common import EVAL, Bug, Pair, normal
from portproof.python39 import zip_strict

T, P = torch.nn, paddle.nn


# U-Net: skips and interpolation.


class RefUNet(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = T.Conv2d(3, 4, 3, padding=1), T.Conv2d(4, 8, 3, padding=1)
        self.up1, self.out = T.Conv2d(12, 4, 3, padding=1), T.Conv2d(4, 2, 1)
        self.pool, self.up = T.MaxPool2d(2), T.Upsample(scale_factor=2, mode="bilinear", align_corners=True)

    def forward(self, x):
        a = TF.elu(self.down1(x))
        b = TF.elu(self.down2(self.pool(a)))
        y = self.out(TF.elu(self.up1(torch.cat([a, self.up(b)], 1))))
        return TF.interpolate(y, size=(10, 12), mode="bilinear", align_corners=False)


class PortUNet(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.down1, self.down2 = P.Conv2D(3, 4, 3, padding=1), P.Conv2D(4, 8, 3, padding=1)
        self.up1, self.out = P.Conv2D(12, 4, 3, padding=1), P.Conv2D(4, 2, 1)
        corners = bug != "corners not aligned"
        self.pool, self.up = P.MaxPool2D(2), P.Upsample(scale_factor=2, mode="bilinear", align_corners=corners)

    def forward(self, x):
        a = PF.elu(self.down1(x))
        b = PF.elu(self.down2(self.pool(a)))
        y = self.out(PF.elu(self.up1(paddle.concat([a, self.up(b)], axis=1))))
        mode = "nearest" if self.bug == "nearest at the end" else "bilinear"
        return PF.interpolate(y, size=[10, 12], mode=mode, align_corners=False)


# FPN: between backbone and pyramid a dict here, a list there.


class RefStages(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s1, self.s2, self.s3 = T.Conv2d(3, 4, 3, 2, 1), T.Conv2d(4, 4, 3, 2, 1), T.Conv2d(4, 4, 3, 2, 1)

    def forward(self, x):
        c1 = torch.tanh(self.s1(x))
        c2 = torch.tanh(self.s2(c1))
        return {"c1": c1, "c2": c2, "c3": torch.tanh(self.s3(c2))}


class RefPyramid(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = T.ModuleList([T.Conv2d(4, 6, 1) for _ in range(3)])
        self.outer = T.ModuleList([T.Conv2d(6, 6, 3, padding=1) for _ in range(3)])

    def forward(self, features):
        last, found = None, {}
        for i, (name, x) in reversed(list(enumerate(features.items()))):
            side = self.inner[i](x)
            last = side if last is None else side + TF.interpolate(last, size=side.shape[-2:], mode="nearest")
            found[name] = self.outer[i](last)
        return found


class RefFPN(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.fpn = RefStages(), RefPyramid()

    def forward(self, x):
        found = self.fpn(self.backbone(x))
        return [found["c1"], found["c2"], found["c3"]]


class PortStages(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.s1, self.s2, self.s3 = P.Conv2D(3, 4, 3, 2, 1), P.Conv2D(4, 4, 3, 2, 1), P.Conv2D(4, 4, 3, 2, 1)

    def forward(self, x):
        c1 = paddle.tanh(self.s1(x))
        c2 = paddle.tanh(self.s2(c1))
        c3 = self.s3(c2)
        return [c1, c2, c3 if self.bug == "last stage not activated" else paddle.tanh(c3)]


class PortPyramid(P.Layer):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        self.inner = P.LayerList([P.Conv2D(4, 6, 1) for _ in range(3)])
        self.outer = P.LayerList([P.Conv2D(6, 6, 3, padding=1) for _ in range(3)])

    def forward(self, features):
        last, found = None, []
        for x, inner, outer in reversed(list(zip_strict(features, self.inner, self.outer))):
            side = inner(x)
            if last is not None and self.bug != "no path from above":
                side = side + PF.interpolate(last, size=side.shape[2:], mode="nearest")
            last = side
            found.insert(0, outer(last))
        return found


class PortFPN(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.backbone, self.fpn = PortStages(bug), PortPyramid(bug)

    def forward(self, x):
        return self.fpn(self.backbone(x))


# SSD: heads that all levels share, called for the small one first there.


class RefSSD(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.extra = T.Conv2d(3, 6, 3, 2, 1), T.Conv2d(6, 6, 3, 2, 1)
        self.cls, self.box = T.Conv2d(6, 4, 3, padding=1), T.Conv2d(6, 8, 3, padding=1)

    def forward(self, x):
        a = torch.relu(self.stem(x))
        levels = [a, torch.relu(self.extra(a))]
        cls = [self.cls(y).permute(0, 2, 3, 1).reshape(len(x), -1, 2) for y in levels]
        box = [self.box(y).permute(0, 2, 3, 1).reshape(len(x), -1, 4) for y in levels]
        return torch.cat(cls, 1), torch.cat(box, 1)


class PortSSD(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.stem, self.extra = P.Conv2D(3, 6, 3, 2, 1), P.Conv2D(6, 6, 3, 2, 1)
        self.cls, self.box = P.Conv2D(6, 4, 3, padding=1), P.Conv2D(6, 8, 3, padding=1)

    def forward(self, x):
        a = PF.relu(self.stem(x))
        found = []
        for y in (PF.relu(self.extra(a)), a):
            c, b = (head(y).transpose([0, 2, 3, 1]) for head in (self.cls, self.box))
            found.append((c.reshape([x.shape[0], -1, 2]), b.reshape([x.shape[0], -1, 4])))
        (c2, b2), (c1, b1) = found
        boxes = [b2, b1] if self.bug == "boxes in the other order" else [b1, b2]
        return paddle.concat([c1, c2], axis=1), paddle.concat(boxes, axis=1)


# ASPP: dilated branches and one of the whole image.


class RefASPP(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pooled = T.Conv2d(3, 6, 3, padding=1), T.Conv2d(6, 4, 1)
        self.branches = T.ModuleList([T.Conv2d(6, 4, 3, padding=d, dilation=d) for d in (1, 2, 3)])
        self.project = T.Conv2d(16, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        whole = TF.interpolate(self.pooled(TF.adaptive_avg_pool2d(x, 1)), x.shape[2:], mode="bilinear")
        return self.project(TF.softplus(torch.cat([*(branch(x) for branch in self.branches), whole], 1)))


class PortASPP(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        rates = (1, 2, 4) if bug == "another dilation" else (1, 2, 3)
        self.stem, self.pooled = P.Conv2D(3, 6, 3, padding=1), P.Conv2D(6, 4, 1)
        self.branches = P.LayerList([P.Conv2D(6, 4, 3, padding=d, dilation=d) for d in rates])
        self.project = P.Conv2D(16, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        whole = self.pooled(PF.adaptive_avg_pool2d(x, 1)).expand([-1, -1, *x.shape[2:]])
        return self.project(PF.softplus(paddle.concat([*(branch(x) for branch in self.branches), whole], axis=1)))


# A spatial transformer.


class RefSTN(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta, self.conv = T.Linear(16, 6), T.Conv2d(1, 3, 3)

    def forward(self, x):
        theta = 0.1 * torch.tanh(self.theta(TF.adaptive_avg_pool2d(x, 4).flatten(1))).view(-1, 2, 3)
        grid = TF.affine_grid(theta + torch.eye(2, 3), list(x.shape), align_corners=False)
        return self.conv(TF.grid_sample(x, grid, align_corners=False))


class PortSTN(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug, self.theta, self.conv = bug, P.Linear(16, 6), P.Conv2D(1, 3, 3)

    def forward(self, x):
        theta = 0.1 * paddle.tanh(self.theta(PF.adaptive_avg_pool2d(x, 4).flatten(1))).reshape([-1, 2, 3])
        theta = theta + paddle.eye(2, 3, dtype=theta.dtype)
        grid = PF.affine_grid(theta, x.shape, align_corners=False)
        corners = self.bug == "Paddle's default corners"
        return self.conv(PF.grid_sample(x, grid, align_corners=corners))


# Superresolution: PixelShuffle, and an output that is clipped.


class RefESPCN(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shuffle = (
            T.Conv2d(1, 6, 3, padding=1),
            T.Conv2d(6, 4, 3, padding=1),
            T.PixelShuffle(2),
        )

    def forward(self, x):
        return self.shuffle(self.conv2(torch.tanh(self.conv1(x)))).clamp(0.0, 1.0)


class PortESPCN(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.low = -1.0 if bug == "clipped elsewhere" else 0.0
        self.conv1, self.conv2 = P.Conv2D(1, 6, 3, padding=1), P.Conv2D(6, 4, 3, padding=1)
        self.shuffle = P.PixelShuffle(2)

    def forward(self, x):
        return self.shuffle(self.conv2(paddle.tanh(self.conv1(x)))).clip(self.low, 1.0)


# A generator: transposed convolutions, group norm, leaky ReLU.


class RefGenerator(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.up1 = T.Linear(6, 32), T.ConvTranspose2d(8, 8, 3, 2, 1, output_padding=1)
        self.norm1, self.act = T.GroupNorm(4, 8), T.LeakyReLU(0.2)
        self.up2 = T.ConvTranspose2d(8, 3, 4, 2, 1, bias=False)

    def forward(self, z):
        x = self.up1(self.fc(z).view(-1, 8, 2, 2))
        return torch.tanh(self.up2(self.act(self.norm1(x))))


class PortGenerator(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.fc, self.up1 = P.Linear(6, 32), P.Conv2DTranspose(8, 8, 3, 2, 1, output_padding=1)
        self.norm1 = P.GroupNorm(4, 8, epsilon=1e-2 if bug == "epsilon of the group norm" else 1e-5)
        self.act = P.LeakyReLU() if bug == "default slope of the layer" else P.LeakyReLU(0.2)
        self.up2 = P.Conv2DTranspose(8, 3, 4, 2, 1, bias_attr=False)

    def forward(self, z):
        x = self.up1(self.fc(z).reshape([-1, 8, 2, 2]))
        return paddle.tanh(self.up2(self.act(self.norm1(x))))


# Style transfer: reflected borders, instance norm.


class RefStyle(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pad, self.conv = T.ReflectionPad2d(1), T.Conv2d(3, 6, 3, 2)
        self.norm, self.up = T.InstanceNorm2d(6, affine=True), T.Upsample(scale_factor=2)
        self.plain, self.out = T.InstanceNorm2d(6), T.Conv2d(6, 3, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(self.pad(x))))
        return self.out(self.plain(self.up(x) + 0.5))


class PortStyle(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        mode = "replicate" if bug == "replicated border" else "reflect"
        self.pad, self.conv = P.Pad2D(1, mode=mode), P.Conv2D(3, 6, 3, 2)
        self.norm, self.up = P.InstanceNorm2D(6), P.Upsample(scale_factor=2)
        self.plain, self.out = P.InstanceNorm2D(6, weight_attr=False, bias_attr=False), P.Conv2D(6, 3, 1)

    def forward(self, x):
        x = PF.relu(self.norm(self.conv(self.pad(x))))
        return self.out(self.plain(self.up(x) + 0.5))


# A discriminator with spectral norm; evaluated, so that its vectors stay.


class RefDiscriminator(T.Module):
    def __init__(self) -> None:
        super().__init__()
        sn = T.utils.spectral_norm
        self.conv1, self.conv2 = sn(T.Conv2d(3, 6, 4, 2, 1)), sn(T.Conv2d(6, 8, 4, 2, 1))
        self.fc = sn(T.Linear(8, 1))

    def forward(self, x):
        x = TF.leaky_relu(self.conv1(x), 0.2)
        return self.fc(TF.leaky_relu(self.conv2(x), 0.2).sum((2, 3)))


class PortDiscriminator(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        sn = P.utils.spectral_norm
        self.bug, self.conv1, self.conv2 = bug, sn(P.Conv2D(3, 6, 4, 2, 1)), sn(P.Conv2D(6, 8, 4, 2, 1))
        self.fc = sn(P.Linear(8, 1))

    def forward(self, x):
        x = PF.leaky_relu(self.conv1(x), 0.2)
        x = PF.leaky_relu(self.conv2(x), 0.2)
        return self.fc(x.mean([2, 3]) if self.bug == "mean for the sum" else x.sum([2, 3]))


# A VAE, which draws nothing when it is evaluated.


class RefVAE(T.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.moments, self.decoder = T.Linear(8, 10), T.Linear(10, 6), T.Linear(3, 8)

    def forward(self, x):
        mean, log_var = self.moments(TF.gelu(self.encoder(x))).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var) if self.training else mean
        return torch.sigmoid(self.decoder(z)), mean, log_var


class PortVAE(P.Layer):
    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.encoder, self.moments, self.decoder = P.Linear(8, 10), P.Linear(10, 6), P.Linear(3, 8)

    def forward(self, x):
        mean, log_var = self.moments(PF.gelu(self.encoder(x))).chunk(2, axis=1)
        if self.bug == "variance clipped":
            log_var = log_var.clip(-0.5, 0.5)
        z = mean + paddle.randn(mean.shape) * paddle.exp(0.5 * log_var) if self.training else mean
        return PF.sigmoid(self.decoder(z)), mean, log_var


PICTURES = normal(2, 3, 8, 8)
PAIRS = {
    "unet": Pair(RefUNet, PortUNet, [PICTURES], {"corners not aligned": Bug("up"), "nearest at the end": Bug("")}),
    "fpn": Pair(
        RefFPN, PortFPN, [PICTURES], {"no path from above": Bug("fpn"), "last stage not activated": Bug("backbone")}
    ),
    "ssd": Pair(RefSSD, PortSSD, [PICTURES], {"boxes in the other order": Bug("")}),
    "aspp": Pair(RefASPP, PortASPP, [PICTURES], {"another dilation": Bug("branches.2")}),
    "spatial transformer": Pair(RefSTN, PortSTN, [normal(2, 1, 8, 8)], {"Paddle's default corners": Bug("")}),
    "superresolution": Pair(RefESPCN, PortESPCN, [normal(2, 1, 5, 5)], {"clipped elsewhere": Bug("")}),
    "generator": Pair(
        RefGenerator,
        PortGenerator,
        [normal(3, 6)],
        {
            "epsilon of the group norm": Bug("norm1", "epsilon"),
            "default slope of the layer": Bug("act", "leaky"),
        },
    ),
    "style transfer": Pair(RefStyle, PortStyle, [PICTURES], {"replicated border": Bug("pad")}),
    "discriminator": Pair(RefDiscriminator, PortDiscriminator, [PICTURES], {"mean for the sum": Bug("")}, modes=EVAL),
    "vae": Pair(RefVAE, PortVAE, [normal(4, 8)], {"variance clipped": Bug("")}, modes=EVAL),
}
