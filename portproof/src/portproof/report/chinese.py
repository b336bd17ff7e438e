"""The page in Chinese, by the English words. What the terminal printed is quoted as it is."""

from __future__ import annotations

import re
from functools import cache

from portproof.report import text

CHINESE = {
    "all steps": "全部步骤",
    "All {:,} items of {} steps are within their limits.": "{1} 个步骤的全部 {0:,} 个比较项都在阈值以内。",
    "No step was run.": "没有运行任何步骤。",
    "{} of {} steps could not be judged; the first is {}, {}.": "{1} 个步骤中有 {0} 个无法判定，第一个是 {2}（{3}）。",
    "{} of {} steps failed; the first, {}, {}, raised an error.": "{1} 个步骤中有 {0} 个未通过；第一个是 {2}（"
    "{3}），运行出错。",
    "{} of {} steps failed; the first, {}, {}, first differs at {}.": "{1} 个步骤中有 {0} 个未通过；第一个是 {2}"
    "（{3}），最先在 {4} 处出现差异。",
    "1 item": "1 个比较项",
    "{:,} items": "{:,} 个比较项",
    ", all equal": "，全部相等",
    ", worst share {}": "，最大占比 {}",
    ", first {}": "，最先是 {}",
    ", seed {}": "，seed {}",
    "Reference": "参考代码",
    "Port": "移植版",
    "{} at {}": "{}，位置 {}",
    "{} in projection {}": "{}，投影 {}",
    "{:.3e}, limit {:.3e}": "{:.3e}，阈值 {:.3e}",
    ": {} times the limit": "：阈值的 {} 倍",
    ", {:.1e} of the largest value": "，最大值的 {:.1e}",
    "Difference": "差异",
    "Over the limit": "超出阈值",
    "{:,} of {:,} values ({:.1%})": "{1:,} 个数中有 {0:,} 个（{2:.1%}）",
    "Reason": "原因",
    "{} of {} checks of this step agree": "本步骤的 {1} 项检查中有 {0} 项一致",
    "{} of {} items of this check agree": "本项检查的 {1} 个比较项中有 {0} 个一致",
    "no checks of this step": "本步骤没有更早的检查",
    "no items of this check": "本项检查没有更早的比较项",
    "Error": "错误",
    "nothing was compared": "没有比较任何数据",
    "; ": "；",
    "Check": "检查",
    "Item": "比较项",
    "Agreed before": "此前一致的",
    "Location": "位置",
    "Usual causes": "常见原因",
    "What could not be judged, first": "最先无法判定的",
    "What differs first": "最先出现的差异",
    "Step": "步骤",
    "Steps": "步骤",
    "Steps build on earlier ones. Worst share: difference / the widest limit an item may get; at most 1 passes.": "每个"
    "步骤以前面的步骤为基础。最大占比：差异 / 比较项可用的最宽阈值，不超过 1 即通过。",
    "not run: {}": "未运行：{}",
    "Status": "状态",
    "Model": "模型",
    "Items": "比较项",
    "Worst share": "最大占比",
    "Seconds": "秒",
    "Size": "大小",
    "Limit": "阈值",
    "Share": "占比",
    "Worst item": "差异最大的比较项",
    "Shape": "形状",
    "It raised {}": "运行出错：{}",
    "All {:,} items, in order": "全部 {:,} 个比较项，按顺序",
    "{:,} of {:,} items: what differs, then what is nearest to its limit": "{1:,} 个比较项中的 {0:,} 个：先是有"
    "差异的，再是最接近阈值的",
    "Items: {}": "比较项：{}",
    "Images that differ": "有差异的图像",
    "Back from normalization to colours, clipped to what can be shown. The difference is dark where there is none "
    "and brightest at its largest.": "已从归一化还原为颜色，并截断到可显示的范围。差异图中越亮差异越大，没有差异"
    "处为暗色。",
    "reference": "参考代码",
    "port": "移植版",
    "no picture: {}": "无法显示：{}",
    "{}, values {:.4g} to {:.4g}": "{}，值从 {:.4g} 到 {:.4g}",
    "{} of {} pixels differ, by up to {:.4g}": "{1} 个像素中有 {0} 个不同，最多相差 {2:.4g}",
    "Difference against limit, along the network": "沿网络各层的差异与阈值",
    "difference": "差异",
    "limit": "阈值",
    "over the limit": "超出阈值",
    "over the limit (top edge: NaN or wrong shape)": "超出阈值（位于上边缘：NaN 或形状不符）",
    "equal to the last bit": "逐位相等",
    "Largest share of the limit, iteration by iteration": "每次迭代的最大占比",
    "loss": "loss 值",
    "gradient": "梯度",
    "parameter": "参数",
    "buffer": "统计量",
    "Both sides, iteration by iteration": "两边逐次迭代的值",
    "reference; of several runs the mean, in a band from the lowest to the highest": "参考代码；多次运行时为均值"
    "，色带为最低到最高",
    "The report as it was printed, without what agrees": "终端打印的报告（略去一致的内容）",
    "Environment": "环境",
    "Every item, as data: summary.json of a ladder, or what --json writes.": "全部比较项以数据形式保存在全部步骤"
    "的 summary.json 或 --json 写出的文件中。",
    "item, in the order of execution": "比较项，按执行顺序",
    "gradient, from the output to the input": "梯度，从输出到输入",
    "largest difference": "最大差异",
    "running statistics": "滑动统计量",
    "{}: gradients of iteration 0": "{}：第 0 次迭代的梯度",
    "{} of {} over the limit, first no. {}: {}": "{1} 个中有 {0} 个超出阈值，最先是第 {2} 个：{3}",
    "Difference and limit of each item, in order": "各比较项的差异与阈值，按顺序",
    "iteration": "迭代",
    "epoch": "epoch",
    "largest difference / limit": "最大差异 / 阈值",
    "over the limit at iteration {}": "在第 {} 次迭代超出阈值",
    "Largest share of the limit at each iteration": "每次迭代的最大占比",
    "{} of both sides at each iteration": "两边每次迭代的{}",
    "{} of both sides at each epoch": "两边每个 epoch 的{}",
    "learning rate": "学习率",
    "top-1 in training": "训练 top-1",
    "top-1 in evaluation": "评估 top-1",
    "value": "值",
}

# Of the usual causes, by their keys.
CAUSES = {
    "output": "分类层，或模块之间的函数（flatten、残差）",
    "Conv2d": "stride、padding、dilation 或 groups；权重没有加载，或加载到了别的层",
    "BatchNorm2d": "epsilon；滑动统计量没有加载（running_mean 在 Paddle 中叫 _mean）；该用 eval 模式却用了 train 模式",
    "Linear": "权重没有转置（Paddle 的形状是 in_features x out_features）；缺少 bias",
    "ReLU": "激活函数不同（ReLU6、hard-swish）",
    "Hardswish": "激活函数不同（swish、ReLU）；hard-swish 的常数不同",
    "Hardsigmoid": "slope（Paddle 默认为 0.1666667，不是 1/6）或 offset；误用 sigmoid",
    "AdaptiveAvgPool2d": "平均池化误为最大池化；池化的轴不对",
    "AvgPool2d": "平均时是否计入 padding（Paddle 的 exclusive=True 不计入）；ceil_mode",
    "MaxPool2d": "padding、ceil_mode",
    "Dropout": "在 eval 模式下仍然生效；缩放的时机不同（Paddle 的 downscale_in_infer）",
    "SqueezeExcitation": "门控应相乘却相加，或作用于别的张量",
    "InvertedResidual": "缺少残差连接，或在通道数或 stride 改变处多了残差连接",
    "Conv2dNormActivation": "卷积、归一化与激活的顺序",
    "buffer running_mean": "BatchNorm 的 momentum：Paddle 的是旧值的权重，等于 1 减去 PyTorch 的",
    "buffer running_var": "用了有偏而不是无偏的方差（相差 n / (n - 1) 倍）；BatchNorm momentum 的约定",
    "buffer num_batches_tracked": "BatchNorm 处于 eval 模式，或统计量没有更新",
    "structure": "缺少或多出一层，或层的大小不同；宽度、卷积核或类别数不同",
    "dropout": "dropout 的概率或模式（Paddle：upscale_in_train）",
    "lr": "学习率策略没有交给优化器、没有 step，或 step 的时机不同；gamma",
    "gradient": "某个运算的反向不同；梯度没有清零，或按 batch size 缩放",
    "parameter": "优化器公式：epsilon、权重衰减、momentum、nesterov、某一组的学习率；按参数组裁剪梯度（"
    "Paddle 的 ClipGradByGlobalNorm 用每组自己的范数裁剪该组）",
    "loss": "损失函数：axis、reduction、标签平滑；或 logits 本身不同（运行 01_test_forward）",
    "metric": "并列值、top-k 的 k、不满的最后一个 batch、平均值的平均",
    "samples": "丢弃了不满的最后一个 batch（drop_last），或重复计数",
    "files": "类别文件夹或文件的列出顺序不同，或按后缀过滤",
    "label": "类别文件夹的排序不同；标签差 1；样本顺序不同",
    "distribution": "没有调用 reset_parameters 或跳过了这一层；fan-in 或分组的 fan、gain 不同、不是正态分布；"
    "初始化器建好却没有使用（Paddle 的 nn.initializer.Normal(weight) 不会填充）",
    "independence": "同一次随机抽取用了两次：广播，或生成器重新设种子",
    "seed": "seed 管不到的生成器（NumPy 的，或新建的）",
    "trajectory": "整个训练过程中的权重衰减、momentum、学习率，或统计量的 momentum",
}
CHINESE |= {text.CAUSES[key]: words for key, words in CAUSES.items()}

# Lines of the text report and cells of its tables. `{}` is a name or a number and stays as it is, but for MODEL, and
# `{list}` may have several; `{text}` is translated if it can be, `{known}` has to be. The longest that fits counts.
MODEL = "the model itself"
LINES = {
    # parts of a line
    "{text}; {text}": "{}；{}",
    # why a step was not run
    "--rungs does not name it": "--rungs 中没有它",
    "it is run for {} only": "只对 {} 运行",
    "it needs {}: pip install -e '.[deploy]'": "需要 {}：pip install -e '.[deploy]'",
    # the place
    "the model itself": "模型本身",
    "forward": "前向",
    "backward": "反向",
    "buffers": "buffer",
    "structure": "结构",
    "weights": "权重",
    "buffers as built": "构建时的 buffer",
    "dropout": "dropout",
    "forward: {text}": "前向：{}",
    "backward: {text}": "反向：{}",
    "buffers: {text}": "buffer：{}",
    "buffers as built: {text}": "构建时的 buffer：{}",
    "structure: {text}": "结构：{}",
    "weights: {text}": "权重：{}",
    "located: {} ({}): {text}": "定位到：{}（{}）：{}",
    "located: {} ({}), the port's {} ({}): {text}": "定位到：{}（{}），移植版的 {}（{}）：{}",
    "the port's {} is in {}": "移植版的 {} 在 {}",
    "also at fault by itself: {} ({}): {text}": "自身也有错误：{}（{}）：{}",
    "also at fault by itself: {} ({}) and {} more of that kind: {text}": "自身也有错误：{}（{}）和另外 {} 个同类的：{}",
    "alone, on the reference's own inputs, {} mode, {}: {} differs": (
        "单独运行，使用参考代码的输入，{} 模式，{}：{} 有差异"
    ),
    "alone, on the reference's own inputs, drawn gradients sent back, {} mode, {}: {} differs": (
        "单独运行，使用参考代码的输入，反向传入随机梯度，{} 模式，{}：{} 有差异"
    ),
    "the whole model, on the reference's own inputs, {} mode, {}: {} differs": (
        "整个模型，使用参考代码的输入，{} 模式，{}：{} 有差异"
    ),
    "{}, alone, on the reference's own inputs, {} mode, {}: {} differs": (
        "{} 单独运行，使用参考代码的输入，{} 模式，{}：{} 有差异"
    ),
    "max|d| {}, limit {}, outside {} of {}": "max|d| {0}，阈值 {1}，{3} 个数中有 {2} 个超出",
    "max|d| {} limit {}": "max|d| {}，阈值 {}",
    "max|d| {} limit {} outside {}/{} ({})": "max|d| {0}，阈值 {1}，{3} 个数中有 {2} 个超出（{4}）",
    "worst: reference {}, port {}": "差异最大：参考代码 {}，移植版 {}",
    "worst at {}: reference {}, port {}": "差异最大处 {}：参考代码 {}，移植版 {}",
    "worst in projection {}: reference {}, port {}": "差异最大处为投影 {}：参考代码 {}，移植版 {}",
    "worst: reference {}, port {}, {} of the largest value": "差异最大：参考代码 {}，移植版 {}，为最大值的 {}",
    "worst at {}: reference {}, port {}, {} of the largest value": (
        "差异最大处 {}：参考代码 {}，移植版 {}，为最大值的 {}"
    ),
    "worst in projection {}: reference {}, port {}, {} of the largest value": (
        "差异最大处为投影 {}：参考代码 {}，移植版 {}，为最大值的 {}"
    ),
    "{} at {}: reference {}, port {}": "{}，位置 {}：参考代码 {}，移植版 {}",
    "{} <--- HERE": "{} <--- 这里",
    "cause, tested: {text}": "验证过的原因：{}",
    "PaddlePaddle's batch norm does so: take one that divides by n - 1, or accept it, --accept '*.running_var: "
    "REASON'": (
        "PaddlePaddle 的 batch norm 就是这样：请改用除以 n - 1 的层，或者接受这一差异：--accept '*.running_var: REASON'"
    ),
    "causes not tried: those of a {} that need torch and the reference": (
        "没有尝试的原因：{} 的那些需要 torch 和参考代码的原因"
    ),
    "raised at {}": "异常出自 {}",
    "the port does not call {} there": "移植版在那里没有调用 {}",
    "its own code feeds {} otherwise at {}, though all before it agrees": (
        "它自己的代码在 {1} 给 {0} 的输入不同，而此前全部一致"
    ),
    "its own code feeds {} otherwise, though all before it agrees": "它自己的代码给 {} 的输入不同，而此前全部一致",
    "{} gets what the reference's gets, and more: it or that is at fault": (
        "{} 得到了参考代码中的全部输入，另外还有别的：错误在它自身，或在多出的输入"
    ),
    "{} gets what the reference's gets, in the form in which right calls get it": (
        "{} 得到了参考代码中的全部输入，形式与结果正确的那些调用相同"
    ),
    "its layers are fed alike, and none is at fault: the difference is made behind the last of them": (
        "它的各层输入相同，且都没有错误：差异产生在最后一层之后"
    ),
    "its value is one of the reference's or one that it holds, but not the one that belongs there, at {}": (
        "这里的值是参考代码中的某一个，或是它自己持有的，但不是该用的那一个：{}"
    ),
    "its values first leave the reference's at {}": "它的值最先在这里与参考代码的不同：{}",
    "or, if they have only another form there, in one of these lines behind it:": (
        "如果那里只是形式不同，就在它后面的某一行："
    ),
    "and {} more, to {}": "还有 {} 行，直到 {}",
    "its {} is {}, the reference's {}": "它的 {} 是 {}，参考代码的是 {}",
    "its {} is not the reference's: {}": "它的 {} 与参考代码的不同：{}",
    "not run alone, and what differs may begin there: {}": "没有单独运行，差异可能从这里开始：{}",
    "the framework's operation differs ({}): its backward gives {} along a direction, where its own forward's "
    "slope is {}": "框架的运算有差异（{}）：它的反向沿一个方向给出 {}，而它自己的前向在那里的斜率是 {}",
    "the framework's operation differs ({}): its backward raises, where its own forward's slope is {}": (
        "框架的运算有差异（{}）：它的反向抛出异常，而它自己的前向在那里的斜率是 {}"
    ),
    "the framework's operation differs ({}): in float32 its {} is {} off its own float64, which agrees with the "
    "reference's": "框架的运算有差异（{}）：在 float32 下，它的 {} 与它自己的 float64 相差 {}，而后者与参考代码一致",
    "no tensor of the graph has values like its output": "计算图中没有与它的输出数值相近的张量",
    "in the graph: {}": "计算图中：{}",
    "{}: {known}": "{}：{}",
    "port's {}: {known}": "移植版的 {}：{}",
    # the first item that fails
    "first difference: {}: {text}": "最先的差异：{}：{}",
    "first refusal: {}: {text}": "最先无法判定的：{}：{}",
    "all items before it agree ({}): look at {} itself": "它前面的 {} 个比较项都一致：请检查 {} 本身",
    "usual causes: {text}": "常见原因：{}",
    "the {text}'s number there is exactly {} times the {text}'s: a sum for a mean, over samples, processes or "
    "accumulated batches?": "那里{0}的数恰好是{2}的 {1} 倍：该对样本、进程或累积的 batch 取平均，却取了和？",
    "the {text}'s number there is near the root of {} times the {text}'s: {text}?": (
        "那里{0}的数约为{2}的 {1} 的平方根倍：{3}？"
    ),
    text.GAINS[2]: "只有一边用了 ReLU 的 gain",
    text.GAINS[3]: "把均匀分布的界当作标准差，或者相反",
    text.GAINS[5]: "把 kaiming_uniform_ 的 a=sqrt(5) 当作 gain",
    text.GAINS[6]: "kaiming_uniform_ 没有 PyTorch 自己的层所用的 a=sqrt(5)",
    # cells
    "equal": "相等",
    "unequal": "不相等",
    "scalar": "标量",
    "{} items": "{} 个比较项",
    "{} of {} items": "{1} 个比较项中的 {0} 个",
    # the last line
    "all {} items within their limits": "全部 {} 个比较项都在阈值以内",
    "{}: all {} items within their limits": "{}：全部 {} 个比较项都在阈值以内",
    "{} of {} items outside their limits": "{1} 个比较项中有 {0} 个超出阈值",
    "{} of {} items outside their limits, first {}": "{1} 个比较项中有 {0} 个超出阈值，最先是 {2}",
    "{}: {} of {} items outside their limits": "{0}：{2} 个比较项中有 {1} 个超出阈值",
    "{}: {} of {} items outside their limits, first {}": "{0}：{2} 个比较项中有 {1} 个超出阈值，最先是 {3}",
    "{}: {} ({}): {known}": "{}：{}（{}）：{}",
    "{}: {} ({}) and {} more of that kind: {known}": "{}：{}（{}）和另外 {} 个同类的：{}",
    "{} accepted": "{} 个已接受",
    "{} accepted, first {}": "{} 个已接受，最先是 {}",
    "{} not judged": "{} 个未判定",
    "{} not judged, first {}": "{} 个未判定，最先是 {}",
    "in {}, {}": "在 {}，{}",
    "{} more at fault by itself": "另有 {} 个自身有错误",
    "{} more at fault by themselves": "另有 {} 个自身有错误",
    "{} branch never entered": "{} 个分支从未进入",
    "{} branches never entered": "{} 个分支从未进入",
    "{} bound of the graph never reached": "图中 {} 个界限从未达到",
    "{} bounds of the graph never reached": "图中 {} 个界限从未达到",
    "{} buffer not compared": "{} 个 buffer 没有比较",
    "{} buffers not compared": "{} 个 buffer 没有比较",
    "one sample alone not compared": "没有单独比较一个样本",
    "gradients in code between layers not compared": "层与层之间代码的梯度没有比较",
    "there {} of {} {text}s differ": "那里 {1} 个{2}中有 {0} 个有差异",
    "there {} of {} {text}s differ, all in {}": "那里 {1} 个{2}中有 {0} 个有差异，都在 {3} 中",
    # reasons
    "accepted": "已接受",
    "accepted: {}": "已接受：{}",
    "there is nothing to compare": "没有可比较的内容",
    "there is nothing to compare: both sides are empty": "没有可比较的内容：两边都是空的",
    "all {} items are accepted": "全部 {} 个比较项都已接受",
    "all {} items are accepted or not judged": "全部 {} 个比较项都已接受，或未判定",
    "every output of the model in {} mode is accepted: nothing is proved of it": (
        "模型在 {} 模式下的输出全部已接受：没有证明任何内容"
    ),
    "every output of the model is accepted: nothing is proved of it": "模型的输出全部已接受：没有证明任何内容",
    "shape: reference {}, port {}": "shape：参考代码 {}，移植版 {}",
    "dtype: reference {}, port {}": "dtype：参考代码 {}，移植版 {}",
    "dtype {} cannot be compared": "dtype {} 无法比较",
    "not finite: reference {}, port {} of {}": "不是有限数：{2} 个数中参考代码有 {0} 个，移植版有 {1} 个",
    "no limit is given for it": "没有给出它的阈值",
    "its limit is {}": "它的阈值是 {}",
    "it is empty": "它是空的",
    "limit {} is not below its largest value {}: zeros would pass": "阈值 {} 不小于它的最大值 {}：全 0 也会通过",
    "it is NaN everywhere on both sides": "两边处处都是 NaN",
    "the port does not have it": "移植版没有它",
    "the reference does not have it": "参考代码没有它",
    "the port's {} does not have it": "移植版的 {} 没有它",
    "the reference's {} does not have it": "参考代码的 {} 没有它",
    "the port has no {} for it": "移植版没有与它对应的 {}",
    "the reference has no {} for it": "参考代码没有与它对应的 {}",
    "the port's module raised {}": "移植版的模块抛出异常 {}",
    "it raised {}": "抛出异常 {}",
    "it raised {} (this run in float64 is the check's own: a port that works in float32 alone is judged in that "
    "alone)": "抛出异常 {}（float64 的这次运行是检查本身需要的：只能在 float32 下运行的移植版，只在 float32 下判定）",
    "float32 overflows": "float32 溢出",
    "{} keeps no digit: its limit {}, its largest value {}": "{} 一位有效数字也不剩：阈值 {}，最大值 {}",
    "a relative change of {} could hide in its limit": "阈值里可能隐藏 {} 的相对变化",
    "the port does not drop here, the reference does, with p {}": "移植版在这里没有 dropout，参考代码有，p 为 {}",
    "the port's {} drops with p {}, the reference does not": "移植版的 {} 有 p 为 {} 的 dropout，参考代码没有",
    "dropout: p is {list} in the port, {list} in the reference": "dropout：移植版的 p 是 {}，参考代码的是 {}",
    "the port is trained in {} mode, the reference in {} mode": "移植版在 {} 模式下训练，参考代码在 {} 模式下训练",
    "reference {}, port {}, first in step {}": "参考代码 {}，移植版 {}，最先在第 {} 步",
    "p is {} in the port's {}, not {}": "移植版的 {1} 的 p 是 {0}，而不是 {2}",
    "the port's {} drops by {} numbers, not {}: whole channels, or single values?": (
        "移植版的 {} 的 dropout 由 {} 个随机数决定，而不是 {} 个：是整个通道，还是单个值？"
    ),
    "float32 keeps no digit of {}: judge the port in float64, too": (
        "float32 下 {} 一位有效数字也不剩：请同时在 float64 下判定移植版"
    ),
    "the reference itself gives NaN or infinity at {}": "参考代码自己在 {} 处给出 NaN 或无穷大",
    "the {text} gives another result each time it runs in {} mode, random numbers are taken by {}: is dropout on?": (
        "{}在 {} 模式下每次运行的结果都不同，{} 使用了随机数：dropout 是否打开？"
    ),
    "the {text} gives another result each time it runs in {} mode, dropout layers aside, random numbers are taken "
    "by {}: draw with rand, randn, normal or bernoulli, which are lent to both sides, or judge the other mode": (
        "{}在 {} 模式下每次运行的结果都不同（dropout 层除外），{} 使用了随机数：请用 rand、randn、normal 或 bernoulli，"
        "两边会得到相同的数；或者判定另一个模式"
    ),
    "the {text} draws {} in {}, the {text} nothing": "{}抽取 {}（在 {} 中），{}不抽取随机数",
    "the {text} holds complex numbers, such as {}, and the {text} none: hold them alike, complex on both sides, or as "
    "real numbers of shape (..., 2)": (
        "{}持有复数，例如 {}，而{}没有：请让两边一致，都用复数，或者都用 shape 为 (..., 2) 的实数"
    ),
    "the sides draw differently in {} mode: the reference {}, the port {}: draw the same kind and shape on both "
    "sides, or judge the other mode": (
        "两边在 {} 模式下抽取的随机数不同：参考代码 {}，移植版 {}：请让两边抽取同一种、同样 shape 的随机数，或者判定另"
        "一个模式"
    ),
    "the reference returns {} and the port {}: say which is which with outputs (--match REF=PORT)": (
        "参考代码返回 {}，移植版返回 {}：请用 outputs（--match REF=PORT）说明如何对应"
    ),
    "{} and {} may be the port's {} and {}, or the other way round: values are the same; say which in a map": (
        "{} 和 {} 可能是移植版的 {} 和 {}，也可能相反：数值相同；请在对应表里说明"
    ),
    "values agree everywhere only against the order in which both sides hold them, with {list}: the port may name "
    "these layers otherwise, or exchange them; say which in a map, with the lines {list} or {list}": (
        "只有按 {} 对应（与双方的定义顺序相反），数值才全部一致：移植版可能给这些层起了别的名称，也可能用错了；"
        "请在对应表里用 {} 或 {} 这些行说明"
    ),
    "values agree everywhere only against the names, with {list}: the port may name these layers otherwise, or "
    "exchange them; say which in a map, with the lines {list} or {list}": (
        "只有按 {} 对应（与名称相反），数值才全部一致：移植版可能给这些层起了别的名称，也可能用错了；请在对应表里用 {} "
        "或 {} 这些行说明"
    ),
    "values agree only with {}, which is square, transposed: the port may store it so, or use it wrongly; say "
    "which in a map, with the line {}: {} or {}: {}": (
        "只有把方阵 {} 转置，数值才一致：移植版可能就这样保存，也可能用错了；请在对应表里用 {}: {} 或 {}: {} 这一行说明"
    ),
    "values agree only with {} as {}, and {} as {}, so in two ways in blocks of one class: the port may store them "
    "so, or use them wrongly; say which in a map, with the line {}: {} or {}: {}": (
        "只有 {} 拼成 {}，而 {} 拼成 {}，数值才一致，即同一个类的模块里有两种方式：移植版可能就这样保存，也可能用错了；"
        "请在对应表里用 {}: {} 或 {}: {} 这一行说明"
    ),
    # causes: of weights
    "it holds zeros: it was not loaded": "它全是 0：没有加载",
    "it holds ones: it was not loaded": "它全是 1：没有加载",
    "it is not transposed (Paddle keeps a linear weight as in x out)": "它没有转置（Paddle 的线性层权重是 (in, out)）",
    "its kernels are turned by 180 degrees": "它的卷积核旋转了 180 度",
    "height and width of its kernels are exchanged": "它的卷积核的高和宽互换了",
    "its input and output channels are exchanged": "它的输入通道和输出通道互换了",
    "it went through {}": "它经过了 {}",
    "it holds the reference's {}": "它的值是参考代码的 {}",
    "{} is transposed": "{} 转置了",
    "{} has its values in another order, transposed perhaps": "{} 的值顺序不同，可能转置了",
    "{} is the recorded one rounded to {}": "{} 是记录的值舍入到 {} 的结果",
    "{} is the recorded one times {}": "{} 是记录的值的 {} 倍",
    "{} has other values than the recorded one (stale)": "{} 的值与记录的不同（是旧的）",
    # of activations
    "GELU, the tanh approximation": "GELU（tanh 近似）",
    "hard-sigmoid with slope {}": "hard-sigmoid（斜率 {}）",
    "hard-sigmoid with slope {}, Paddle's default": "hard-sigmoid（斜率 {}，Paddle 的默认值）",
    "{}, slope {}": "{}（斜率 {}）",
    "{}, alpha {}": "{}（alpha {}）",
    "{}, beta {}": "{}（beta {}）",
    "softmax over the last axis": "最后一个轴上的 softmax",
    "softmax over axis {}": "轴 {} 上的 softmax",
    "the identity": "恒等函数",
    "leaky ReLU": "leaky ReLU",
    "it is {text}, not {text}": "它是 {}，而不是 {}",
    "it is no activation": "没有激活函数",
    "it is no activation, not {text}": "没有激活函数，而应是 {}",
    "it is over axis {}, not {}": "它作用在轴 {} 上，而不是 {}",
    "{text} is applied to what it returns": "对它的返回值又应用了 {}",
    "{text} is applied to what it returns, twice": "对它的返回值又应用了两次 {}",
    # of norms
    "epsilon is {}, not {text}": "epsilon 是 {}，而不是 {}",
    "the dtype's own": "该 dtype 自己的值",
    "weight was not loaded (1)": "weight 没有加载（为 1）",
    "bias was not loaded (0)": "bias 没有加载（为 0）",
    "weight and bias were not loaded (1 and 0)": "weight 和 bias 没有加载（为 1 和 0）",
    "weight and bias are exchanged": "weight 和 bias 互换了",
    "none of its tensors was loaded (weight 1, bias 0, mean 0, variance 1)": (
        "它的张量都没有加载（weight 为 1，bias 为 0，均值为 0，方差为 1）"
    ),
    "it normalizes with its running statistics": "它用滑动统计量做归一化",
    "it normalizes with the batch's own statistics": "它用当前 batch 的统计量做归一化",
    "running mean and variance were not loaded (0 and 1)": "滑动均值和方差没有加载（为 0 和 1）",
    "running mean was not loaded (0)": "滑动均值没有加载（为 0）",
    "running variance was not loaded (1)": "滑动方差没有加载（为 1）",
    "its running variance is used as a standard deviation": "它的滑动方差被当作标准差使用",
    "its variance is sum / (n - 1), not sum / n": "它的方差是 sum / (n - 1)，而不是 sum / n",
    "epsilon is added to the standard deviation, not to the variance": "epsilon 加在标准差上，而不是方差上",
    "variance is sum / (n - 1) and epsilon is added to its root": "方差是 sum / (n - 1)，并且 epsilon 加在它的平方根上",
    "it does not subtract the mean": "它没有减去均值",
    "it subtracts the mean": "它减去了均值",
    "it has {} groups, not {}": "它有 {} 组，而不是 {} 组",
    "the running statistics are not updated": "滑动统计量没有更新",
    "the running variance is the biased one, sum / n (torch's is sum / (n - 1))": (
        "滑动方差用了有偏方差 sum / n（torch 是 sum / (n - 1)）"
    ),
    "momentum={}; write {} (Paddle: weight of the OLD value)": "momentum={}；请写 {}（Paddle 的是旧值的权重）",
    "write {} (Paddle: weight of the OLD value)": "请写 {}（Paddle 的是旧值的权重）",
    "the batch's weight in the running statistics is {}, not {}": "当前 batch 在滑动统计量中的权重是 {}，而不是 {}",
    "batch norm takes the batch's statistics (train mode)": "BatchNorm 用了当前 batch 的统计量（train 模式）",
    # of linear layers, convolutions and pools
    "the weight is not transposed (Paddle keeps it as in x out)": "weight 没有转置（Paddle 的是 (in, out)）",
    "the weight went through {}": "weight 经过了 {}",
    "the bias is missing, or zero": "bias 缺失或为 0",
    "the kernel is turned by 180 degrees": "卷积核旋转了 180 度",
    "height and width of the kernel are exchanged": "卷积核的高和宽互换了",
    "input and output channels of the weight are exchanged": "weight 的输入通道和输出通道互换了",
    "{} is {}, not {}": "{} 是 {}，而不是 {}",
    "padding is {}, not {}, and output_padding {}": "padding 是 {}，而不是 {}；output_padding 是 {}",
    "padding repeats the image ({}), not zeros": "padding 重复图像（{}），而不是补 0",
    "padding is that of 'SAME': one more at the end than at the start": "padding 是 'SAME' 的方式：末尾比开头多一个",
    "padding counts in the mean (Paddle's exclusive is {})": "padding 计入平均（Paddle 的 exclusive 是 {}）",
    "padding does not count in the mean (Paddle's exclusive is {})": "padding 不计入平均（Paddle 的 exclusive 是 {}）",
    "it takes the maximum, not the mean": "它取最大值，而不是平均值",
    "it takes the mean, not the maximum": "它取平均值，而不是最大值",
    "ceil_mode is {}": "ceil_mode 是 {}",
    "it resizes with {}, not {}": "它用 {} 缩放，而不是 {}",
    # of others
    "it has no padding_idx: row {} gets a gradient": "它没有 padding_idx：第 {} 行得到了梯度",
    "padding_idx is {}, not {}: that row gets no gradient": "padding_idx 是 {}，而不是 {}：那一行得不到梯度",
    "padding_idx is {}, and its row gives zeros, as Paddle's does": (
        "padding_idx 是 {}，并且那一行输出 0，与 Paddle 的相同"
    ),
    "it gives {} times its input where nothing is dropped (Paddle's mode downscale_in_infer)": (
        "不做 dropout 时，它给出输入的 {} 倍（Paddle 的 downscale_in_infer 模式）"
    ),
    "dropout is on: {} of the values are 0, the others times {}": "dropout 打开了：{} 的值为 0，其余乘以 {}",
    "axes 0 and 1 are taken for {}, not {}": "轴 0 和 1 被当作 {}，而不是 {}",
    "the projections of {} and {} are exchanged": "{} 和 {} 的投影互换了",
    "the products of query and key are not divided by sqrt(head_dim)": "query 与 key 的乘积没有除以 sqrt(head_dim)",
    "the products of query and key are divided by sqrt(embed_dim), not sqrt(head_dim)": (
        "query 与 key 的乘积除以了 sqrt(embed_dim)，而不是 sqrt(head_dim)"
    ),
    "the biases of query, key and value are missing, or zero": "query、key 和 value 的 bias 缺失或为 0",
    "the bias of out_proj is missing, or zero": "out_proj 的 bias 缺失或为 0",
    "it has {} heads, not {}": "它有 {} 个 head，而不是 {} 个",
    "its gates are in the order {} (torch's is {})": "它的门的顺序是 {}（torch 的是 {}）",
    "the update gate z keeps the new state: z * n + (1 - z) * h, not (1 - z) * n + z * h": (
        "更新门 z 保留的是新状态：z * n + (1 - z) * h，而不是 (1 - z) * n + z * h"
    ),
    "{} is missing, or zero": "{} 缺失或为 0",
    "both biases are missing, or zero": "两个 bias 缺失或为 0",
    "its two directions are exchanged": "它的两个方向互换了",
    "its activation is {}, not {}": "它的激活函数是 {}，而不是 {}",
    "{} is missing": "缺少 {}",
    # of any module
    "it returns its input unchanged": "它原样返回输入",
    "it returns input {} unchanged": "它原样返回输入 {}",
    "it returns what {} gives": "它返回 {} 的输出",
    "it does not add its input (a residual connection is missing)": "它没有加上输入（缺少残差连接）",
    "it does not add input {} (a residual connection is missing)": "它没有加上输入 {}（缺少残差连接）",
    "it adds its input (a residual connection too many)": "它加上了输入（多了残差连接）",
    "it adds input {} (a residual connection too many)": "它加上了输入 {}（多了残差连接）",
    "it adds its input to what {} gives": "它把输入加到 {} 的输出上",
    "it adds input {} to what {} gives": "它把输入 {} 加到 {} 的输出上",
    "it multiplies its input with what {} gives": "它把输入与 {} 的输出相乘",
    "it multiplies input {} with what {} gives": "它把输入 {} 与 {} 的输出相乘",
    "axis {} is reversed": "轴 {} 反转了",
    "axes {} and {} are exchanged": "轴 {} 和 {} 互换了",
    "it is {} times the reference's, everywhere": "它处处是参考代码的 {} 倍",
    "it is the reference's plus {}, everywhere": "它处处比参考代码的大 {}",
    "its parameters are frozen in the port and not in the reference (stop_gradient)": (
        "它的参数在移植版中冻结，在参考代码中没有（stop_gradient）"
    ),
    "its parameters are frozen in the reference and not in the port (requires_grad)": (
        "它的参数在参考代码中冻结，在移植版中没有（requires_grad）"
    ),
    "{} is frozen in the port and not in the reference (stop_gradient)": (
        "{} 在移植版中冻结，在参考代码中没有（stop_gradient）"
    ),
    "{} are frozen in the port and not in the reference (stop_gradient)": (
        "{} 在移植版中冻结，在参考代码中没有（stop_gradient）"
    ),
    "{} is frozen in the reference and not in the port (requires_grad)": (
        "{} 在参考代码中冻结，在移植版中没有（requires_grad）"
    ),
    "{} are frozen in the reference and not in the port (requires_grad)": (
        "{} 在参考代码中冻结，在移植版中没有（requires_grad）"
    ),
    "the port sends no gradient to {list} (detach, no_grad)": "移植版没有把梯度传给 {}（detach、no_grad）",
    "the port sends no gradient through (stop_gradient, detach, no_grad)": (
        "移植版不把梯度传过去（stop_gradient、detach、no_grad）"
    ),
    # notes
    "map: {} tensors, {} outputs, {text}": "对应表：{} 个张量，{} 个输出，{}",
    "map: {} of {} outputs of modules found in the graph by their values": (
        "对应表：在计算图中按数值找到 {1} 个模块输出中的 {0} 个"
    ),
    "by name": "按名称",
    "by order, type and shape": "按顺序、类型和 shape",
    "by name, {} by order, type and shape": "按名称，其中 {} 个按顺序、类型和 shape",
    "by gradients": "按梯度",
    "{text}, confirmed by values {text}": "{}，由数值确认{}",
    "everywhere": "全部",
    "up to layer {} of {}": "到第 {} 层为止（共 {} 层）",
    "{text} (it would agree with {list}: if that is meant against the names, say so in a map)": (
        "{}（若按 {} 对应就一致：如果确实如此，尽管名称不同，请在对应表里说明）"
    ),
    "the map is confirmed {text}": "对应表由数值确认{}",
    "the map is confirmed {text}, and by name beyond": "对应表由数值确认{}，其余按名称",
    "the map is confirmed by no values, since tensors do not fit": "对应表没有由数值确认，因为张量不相符",
    "the map may be at fault where it is not confirmed: put these lines, as they should be, in a file for --map": (
        "对应表未经确认的部分可能有错：请把这些行改成应有的样子，写入供 --map 读取的文件"
    ),
    "and {} more, see --print-map": "还有 {} 行，见 --print-map",
    "not compared as built, since {text}: {}": "没有按构建时的值比较（{}）：{}",
    "a pass in train mode changes them": "train 模式的一次运行会改变它们",
    "the seed changes them": "seed 会改变它们",
    "the reference was given with weights of its own": "给出的参考代码带有自己的权重",
    "they have another name there, and the map is not confirmed": "它们在那里的名称不同，而对应表没有确认",
    "they have another type there": "它们在那里的类型不同",
    "each {text} that is made has the same weights, loaded perhaps": "每次构建的{}权重都相同，可能是载入的",
    "the {text} does not run in train mode, which would tell": "{}在 train 模式下无法运行，而那样才能判断",
    "buffers as built: such a buffer may also be drawn at random, or loaded: only factories (see portproof.align) "
    "can tell": (
        "构建时的 buffer：这样的 buffer 也可能是随机生成或载入的：只有给出 factories（见 portproof.align）才能判断"
    ),
    "built differently, no fault: {text}: {}": "构建方式不同，不是错误：{}：{}",
    "takes other inputs": "输入不同",
    "is called differently": "调用方式不同",
    "returns more, which is cut off outside": "返回得更多，在外面截去",
    "returns its values in another form": "返回值的形式不同",
    "differs for inputs that it does not get here": "对这里没有出现的输入结果不同",
    "gives other values, of which nothing comes": "值不同，但没有影响",
    "has another gradient where an operation has a kink, and only there": "只在运算不可导处梯度不同",
    "takes masks that say the opposite": "接受含义相反的掩码",
    "has the {} behind it inside": "包含了它后面的 {}",
    "leaves to a {} behind it what the reference's does itself": "参考代码自己做的事，交给了后面的 {}",
    "leaves out the {} at the end, which the port has elsewhere": "没有末尾的 {}，移植版把它放在别处",
    "has a {} at the end, which the reference has elsewhere": "末尾有 {}，参考代码把它放在别处",
    "not run alone, so nothing is known of it by itself: {text}: {}": "没有单独运行，所以不知道它自身如何：{}：{}",
    "accepted {}: {} items, largest difference {}": "已接受 {}：{} 个比较项，最大差异 {}",
    "accept {}: no item has this name": "accept {}：没有这个名称的比较项",
    "accept {}: what it names agrees": "accept {}：它指明的比较项一致",
    "accept {}: what it names is beyond what is accepted": "accept {}：它指明的比较项超出了所接受的",
    "random in train mode, and run as in eval mode: the {text}'s {}": (
        "在 train 模式下是随机的，按 eval 模式运行：{}的 {}"
    ),
    "random numbers are lent to both sides in {} mode: {}": "在 {} 模式下两边使用同样的随机数：{}",
    "random numbers are lent to both sides in {} mode: {}, where the port uses {}, as likely": (
        "在 {} 模式下两边使用同样的随机数：{}；移植版用 {}，概率相同"
    ),
    "dropout is not compared, since some of it is left out": "没有比较 dropout，因为其中一些不比较",
    "dropout here drops other values than the port's, so it is in another place: {list}": (
        "这里的 dropout 丢弃的值与移植版的不同，即位置不同：{}"
    ),
    "dropout is alpha dropout on one side only, which is not compared: {list}": (
        "只有一边的 dropout 是 alpha dropout，这一点没有比较：{}"
    ),
    "changed by the {text}'s own runs, and what a later call makes of it is not compared: {list}": (
        "{}运行时改变了它，没有比较下一次调用由此得到的值：{}"
    ),
    "dropout is off, and not compared, since a kernel does it inside of {}": (
        "dropout 已关闭，没有比较，因为 {} 内的算子自己做 dropout"
    ),
    "not compared, since it is not finite, a mask perhaps: {}": "没有比较，因为不是有限数，可能是掩码：{}",
    "not compared, though a pass in train mode changes it, since nothing in the port is paired with it: {}": (
        "没有比较，虽然 train 模式的一次运行会改变它，因为移植版中没有与它对应的：{}"
    ),
    "not proved, since no input enters it: {list}": "没有证明，因为没有输入进入：{}",
    "not proved, since no input reaches this bound of the graph: {list}": (
        "没有证明，因为没有输入达到图中的这个界限：{}"
    ),
    "branches of clip, where, minimum and the like: not watched, the reference is not in PyTorch": (
        "clip、where、minimum 等的分支：没有观察，因为参考代码不是 PyTorch 的"
    ),
    "branches that Python takes by a tensor's numbers (`if`, item()): not watched, in {}": (
        "Python 按张量的值选择的分支（`if`、item()）：没有观察，在 {}"
    ),
    "the rest of the map is proved by the whole: outputs and all gradients agree in float64": (
        "对应表的其余部分由整体证明：输出和全部梯度在 float64 下一致"
    ),
    "the outputs agree on these inputs, and differ on others: {text}": "输出在这些输入上一致，在别的输入上不同：{}",
    "the outputs differ on other inputs ({text}), where a last digit changes the reference's own as much: a tie, or a "
    "value at a bound": "输出在别的输入上不同（{}），而末位的变化同样改变那里参考代码的输出：有相等的值，或值在界限上",
    "not run alone in float32: {}: {}": "没有在 float32 下单独运行：{}：{}",
    "floats {} times as large, input {}": "浮点数变为 {} 倍，输入 {}",
    "floats rolled by {} along axis {}, input {}": "浮点数沿轴 {1} 滚动 {0} 位，输入 {2}",
    "the outputs agree with these weights, and differ with others": "输出在这些权重下一致，在别的权重下不同",
    "the {text} asks for float32, and gets float64 in the float64 run: in {}": (
        "{}要求 float32，而 float64 的运行中得到的是 float64：在 {}"
    ),
    "not recorded of the {text}: {}: {}": "{}没有记录的：{}：{}",
    "float32 data come in at {}: what differs is judged with float32's limits": (
        "float32 数据从 {} 进入：差异按 float32 的阈值判定"
    ),
    "held in float32 by one side only, and limits allow for its rounding: {}": (
        "只有一边以 float32 保存，阈值已计入它的舍入：{}"
    ),
    "float32 constants of the port that are the reference's up to rounding, and taken from it: {}": (
        "移植版的 float32 常量与参考代码的只差舍入，采用参考代码的值：{}"
    ),
    "the port's framework has no kernel in float64 for {}: {} mode was not run in float64, float32's limits alone "
    "judge it: less than these, and gradients in code between layers, are not proved": (
        "移植版的框架没有 {} 的 float64 算子：{} 模式没有在 float64 下运行，只按 float32 的阈值判定：比它更小的差异，以"
        "及层与层之间代码的梯度，没有得到证明"
    ),
    "left out, not compared: {} ({} tensors, {} outputs)": "不比较：{}（{} 个张量，{} 个输出）",
    "in another form there: {list}": "在那里的形式不同：{}",
    "masks that say the opposite there: {list}": "在那里含义相反的掩码：{}",
    "left out, constants that only one side saves: {list}": "不比较只有一边保存的常量：{}",
}


def _pattern(english: str) -> re.Pattern[str]:
    one = re.escape(english).replace(r"\{\}", "((?:(?!; ).)+?)")
    return re.compile(re.sub(r"\\\{\w+\\\}", "(.+?)", one))


TRANSLATED = ("text", "known")
PATTERNS = [
    (_pattern(english), re.findall(r"\{(\w*)\}", english), LINES[english])
    for english in sorted(LINES, key=lambda english: -len(re.sub(r"\{\w*\}", "", english)))
]


@cache
def in_chinese(english: str) -> str:
    """The page's own words, or a line of the text report; what is not known stays as it is, or that part of it."""
    line = english.lstrip()
    if line in CHINESE:
        return CHINESE[line]
    for pattern, kinds, chinese in PATTERNS:
        if not (match := pattern.fullmatch(line)):
            continue
        groups = [group.strip() for group in match.groups()]
        said = [
            in_chinese(group) if kind in TRANSLATED or group == MODEL else group for kind, group in zip(kinds, groups)
        ]
        if all(kind != "known" or new != old for kind, new, old in zip(kinds, said, groups)):
            return english[: len(english) - len(line)] + chinese.format(*said)
    return english
