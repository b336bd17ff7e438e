"""The page's own words in Chinese, by the English ones. What the terminal prints is quoted as it is."""

CHINESE = {
    "ladder of checks": "全部步骤",
    "All {:,} items of {} rungs are within their limits.": "{1} 个步骤的全部 {0:,} 个比较项都在阈值以内。",
    "No rung was run.": "没有运行任何步骤。",
    "{} of {} rungs could not be judged; the first is {}, {}.": "{1} 个步骤中有 {0} 个无法判定，第一个是 {2}（{3}）。",
    "{} of {} rungs failed; the first, {}, {}, raised an error.": "{1} 个步骤中有 {0} 个未通过；第一个是 {2}（"
    "{3}），运行出错。",
    "{} of {} rungs failed; the first, {}, {}, first differs at {}.": "{1} 个步骤中有 {0} 个未通过；第一个是 {2}"
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
    "{} of {} checks of this rung agree": "本步骤的 {1} 项检查中有 {0} 项一致",
    "{} of {} items of this check agree": "本项检查的 {1} 个比较项中有 {0} 个一致",
    "no checks of this rung": "本步骤没有更早的检查",
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
    "Rung": "步骤",
    "Rungs": "步骤",
    "Rungs build on earlier ones. Worst share: difference / limit; at most 1 passes.": "每个步骤以前面的步骤为基"
    "础。最大占比：差异 / 阈值，不超过 1 即通过。",
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
    "The report as it was printed": "终端打印的报告",
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
    "{} of both sides at each epoch": "两边每个 epoch的{}",
    "learning rate": "学习率",
    "top-1 in training": "训练 top-1",
    "top-1 in evaluation": "评估 top-1",
    "value": "值",
    "the classifier, or a function between modules (flatten, residual)": "分类层，或模块之间的函数（flatten、残差）",
    "stride, padding, dilation or groups; a weight that was not loaded or was loaded into another layer": "stride、"
    "padding、dilation 或 groups；权重没有加载，或加载到了别的层",
    "epsilon; running statistics not loaded (running_mean is _mean in Paddle); train for eval mode": "epsilon；"
    "滑动统计量没有加载（running_mean 在 Paddle 中叫 _mean）；该用 eval 模式却用了 train 模式",
    "weight not transposed (Paddle keeps it as in_features x out_features); bias missing": "权重没有转置（"
    "Paddle 的形状是 in_features x out_features）；缺少 bias",
    "another activation (ReLU6, hard-swish)": "激活函数不同（ReLU6、hard-swish）",
    "another activation (swish, ReLU); hard-swish with other constants": "激活函数不同（swish、ReLU）；"
    "hard-swish 的常数不同",
    "slope (Paddle's default is 0.1666667, not 1/6) or offset; sigmoid in its place": "slope（Paddle 默认为 "
    "0.1666667，不是 1/6）或 offset；误用 sigmoid",
    "max for average pooling; a pool over the wrong axes": "平均池化误为最大池化；池化的轴不对",
    "whether padding counts in the mean (Paddle's exclusive=True leaves it out); ceil_mode": "平均时是否计入 "
    "padding（Paddle 的 exclusive=True 不计入）；ceil_mode",
    "padding, ceil_mode": "padding、ceil_mode",
    "active in eval mode; outputs scaled at another time (Paddle's downscale_in_infer)": "在 eval 模式下仍然生效"
    "；缩放的时机不同（Paddle 的 downscale_in_infer）",
    "the gate added instead of multiplied, or applied to another tensor": "门控应相乘却相加，或作用于别的张量",
    "the residual connection missing, or present where channels or stride change": "缺少残差连接，或在通道数或 "
    "stride 改变处多了残差连接",
    "order of convolution, normalization and activation": "卷积、归一化与激活的顺序",
    "batch-norm momentum: Paddle's is the share of the OLD value, 1 - PyTorch's": "BatchNorm的 momentum：Paddle "
    "的是旧值的权重，等于 1 减去 PyTorch 的",
    "biased instead of unbiased batch variance (factor n / (n - 1)); batch-norm momentum convention": "用了有偏而"
    "不是无偏的方差（相差 n / (n - 1) 倍）；BatchNorm momentum 的约定",
    "batch norm in eval mode, or statistics not updated": "BatchNorm处于 eval 模式，或统计量没有更新",
    "a layer missing, added or of another size; another width, kernel or number of classes": "缺少或多出一层，或"
    "层的大小不同；宽度、卷积核或类别数不同",
    "dropout probability, or its mode (Paddle: upscale_in_train)": "dropout 的概率或模式（Paddle：upscale_in_train）",
    "the schedule is not attached to the optimizer, not stepped, or stepped at another time; gamma": "学习率策略"
    "没有交给优化器、没有 step，或 step 的时机不同；gamma",
    "an operation whose backward differs; a gradient not cleared, or scaled by the batch": "某个运算的反向不同；"
    "梯度没有清零，或按batch size缩放",
    "optimizer formula: epsilon, weight decay, momentum, nesterov, learning rate of one group, clipping": "优化器公式："
    "epsilon、权重衰减、momentum、nesterov、某一组的学习率、梯度裁剪",
    "criterion: axis, reduction, label smoothing; or logits that differ (run 01_test_forward)": "损失函数：axis"
    "、reduction、标签平滑；或 logits 本身不同（运行 01_test_forward）",
    "ties, the k of top-k, the last partial batch, an average of averages": "并列值、top-k 的 k、不满的最后一个 batch"
    "、平均值的平均",
    "a last batch that is not full left out (drop_last), or images counted twice": "丢弃了不满的最后一个 batch（"
    "drop_last），或重复计数",
    "class folders or files listed in another order, or filtered by suffix": "类别文件夹或文件的列出顺序不同，或"
    "按后缀过滤",
    "class folders sorted otherwise; labels off by one; samples in another order": "类别文件夹的排序不同；标签差"
    " 1；样本顺序不同",
    "reset_parameters not called or past this layer; fan-in or the fan of a group, another gain, no normal; an "
    "initializer that is built and dropped (Paddle's nn.initializer.Normal(weight) fills nothing)": "没有调用 "
    "reset_parameters 或跳过了这一层；fan-in 或分组的 fan、gain 不同、不是正态分布；初始化器建好却没有使用（"
    "Paddle 的 nn.initializer.Normal(weight) 不会填充）",
    "one draw used twice: broadcast, or the generator seeded again": "同一次随机抽取用了两次：广播，或生成器重新设种子",
    "a generator that the seed does not reach (NumPy's, or one made anew)": "seed 管不到的生成器（NumPy 的，或新建的）",
    "weight decay, momentum, learning rate, or the statistics' momentum over a whole run": "整个训练过程中的权重"
    "衰减、momentum、学习率，或统计量的 momentum",
}
