"""The blocks of Python in the five articles that the documentation answers (docs/articles.md), as they print
them: code and the remarks on its lines, without the text around. All are of article 004, "Flash Attention";
000 and 003 have CUDA and JavaScript beside their text, 001 and 002 formulas."""

from __future__ import annotations

ONLINE_SOFTMAX = """\
def online_softmax_update(old_output, old_max, old_sum, new_scores, new_V):
    new_max = max(new_scores)

    # 更新全局最大值
    global_max = max(old_max, new_max)

    # 调整之前的结果(因为最大值变了)
    correction = exp(old_max - global_max)
    old_output = old_output * correction
    old_sum = old_sum * correction

    # 计算当前块的贡献
    new_exp = exp(new_scores - global_max)
    new_sum = sum(new_exp)
    new_output = matmul(new_exp, new_V)

    # 合并
    total_sum = old_sum + new_sum
    total_output = old_output + new_output

    return total_output, global_max, total_sum
"""

SDPA = """\
import torch
import torch.nn.functional as F

q = torch.randn(1, 8, 4096, 64, device='cuda')  # [batch, heads, seq, dim]
k = torch.randn(1, 8, 4096, 64, device='cuda')
v = torch.randn(1, 8, 4096, 64, device='cuda')

with torch.backends.cuda.sdp_kernel(
    enable_flash=True,  # 启用 Flash Attention
    enable_math=False,  # 禁用标准实现
    enable_mem_efficient=False
):
    output = F.scaled_dot_product_attention(q, k, v)

print(output.shape)  # [1, 8, 4096, 64]
"""

FLASH_ATTN = """\
from flash_attn import flash_attn_func

# 输入形状: [batch, seq_len, num_heads, head_dim]
q = torch.randn(1, 4096, 8, 64, device='cuda', dtype=torch.float16)
k = torch.randn(1, 4096, 8, 64, device='cuda', dtype=torch.float16)
v = torch.randn(1, 4096, 8, 64, device='cuda', dtype=torch.float16)

# Flash Attention 2
output = flash_attn_func(q, k, v, causal=True)  # causal=True 用于解码器

print(output.shape)  # [1, 4096, 8, 64]
"""

VARLEN = """\
from flash_attn import flash_attn_varlen_func

# cu_seqlens: 累积序列长度,用于批处理不同长度的序列
"""

TRANSFORMERS = """\
from transformers import AutoModelForCausalLM

# 方式 1:加载时启用 Flash Attention 2
model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-2-7b-hf",
    torch_dtype=torch.float16,
    attn_implementation="flash_attention_2",  # 关键参数
    device_map="auto"
)

# 方式 2:配置文件中指定
# config.json: {"attn_implementation": "flash_attention_2"}

# 检查是否启用
print(model.config._attn_implementation)  # "flash_attention_2"
"""

BEST_PRACTICE = """\
# 1. 数据类型要求
# Flash Attention 要求 FP16 或 BF16
q = q.half()  # 或 q.bfloat16()

# 2. 头维度要求
# head_dim 必须是 8 的倍数,推荐 64 或 128

# 3. Causal Mask
# 使用 causal=True 比传递 mask 矩阵更高效
output = flash_attn_func(q, k, v, causal=True)  # ✅
"""

MASK_MATRIX = """\
output = flash_attn_func(q, k, v, attn_mask=causal_mask)  # ❌ 慢
"""
