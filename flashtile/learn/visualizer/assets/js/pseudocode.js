// The papers' algorithms, line by line, with the line that runs lit. lines.js knows which event is which line.

const PSEUDOCODE = {
  standard: [
    [1, 0, "load Q, K by blocks; S = Q Kᵀ; write S"],
    [2, 0, "read S; P = softmax(S); write P"],
    [3, 0, "load P, V by blocks; O = P V; write O"],
    [4, 0, "return O"],
  ],
  flash1: [
    [1, 0, "Bc = ⌈M / 4d⌉, Br = min(⌈M / 4d⌉, d)"],
    [2, 0, "O = 0, ℓ = 0, m = −∞ in HBM"],
    [3, 0, "Q in Tr blocks; K, V in Tc blocks"],
    [4, 0, "O, ℓ, m in Tr blocks"],
    [5, 0, "for j = 1 … Tc"],
    [6, 1, "load Kⱼ, Vⱼ"],
    [7, 1, "for i = 1 … Tr"],
    [8, 2, "load Qᵢ, Oᵢ, ℓᵢ, mᵢ"],
    [9, 2, "S = Qᵢ Kⱼᵀ"],
    [10, 2, "m̃ = rowmax(S), P = exp(S − m̃), ℓ̃ = rowsum(P)"],
    [11, 2, "m′ = max(mᵢ, m̃), ℓ′ = exp(mᵢ − m′) ℓᵢ + exp(m̃ − m′) ℓ̃"],
    [12, 2, "write Oᵢ = (ℓᵢ exp(mᵢ − m′) Oᵢ + exp(m̃ − m′) P Vⱼ) / ℓ′"],
    [13, 2, "write ℓᵢ = ℓ′, mᵢ = m′"],
    [14, 1, "end"],
    [15, 0, "end"],
    [16, 0, "return O"],
  ],
  flash2: [
    [1, 0, "Q in Tr blocks; K, V in Tc blocks"],
    [2, 0, "O, L in Tr blocks"],
    [3, 0, "for i = 1 … Tr"],
    [4, 1, "load Qᵢ"],
    [5, 1, "O = 0, ℓ = 0, m = −∞ on chip"],
    [6, 1, "for j = 1 … Tc"],
    [7, 2, "load Kⱼ, Vⱼ"],
    [8, 2, "S = Qᵢ Kⱼᵀ"],
    [9, 2, "m′ = max(m, rowmax(S)), P = exp(S − m′), ℓ = exp(m − m′) ℓ + rowsum(P)"],
    [10, 2, "O = exp(m − m′) O + P Vⱼ"],
    [11, 1, "end"],
    [12, 1, "O = O / ℓ"],
    [13, 1, "L = m + log ℓ"],
    [14, 1, "write Oᵢ = O"],
    [15, 1, "write Lᵢ = L"],
    [16, 0, "end"],
    [17, 0, "return O, L"],
  ],
  standard_backward: [
    [1, 0, "load P, dO by blocks; dV = Pᵀ dO; write dV"],
    [2, 0, "load dO, V by blocks; dP = dO Vᵀ; write dP"],
    [3, 0, "read P, dP; dS = P ∘ (dP − rowsum(P ∘ dP)); write dS"],
    [4, 0, "load dS, K by blocks; dQ = dS K; write dQ"],
    [5, 0, "load dS, Q by blocks; dK = dSᵀ Q; write dK"],
    [6, 0, "return dQ, dK, dV"],
  ],
  flash1_backward: [
    [5, 0, "dQ = 0, dK = 0, dV = 0 in HBM"],
    [6, 0, "for j = 1 … Tc"],
    [7, 1, "load Kⱼ, Vⱼ"],
    [8, 1, "dK = 0, dV = 0 on chip"],
    [9, 1, "for i = 1 … Tr"],
    [10, 2, "load Qᵢ, Oᵢ, dOᵢ, dQᵢ, ℓᵢ, mᵢ"],
    [11, 2, "S = Qᵢ Kⱼᵀ"],
    [13, 2, "P = exp(S − mᵢ) / ℓᵢ"],
    [16, 2, "dV = dV + Pᵀ dOᵢ"],
    [17, 2, "dP = dOᵢ Vⱼᵀ"],
    [19, 2, "D = rowsum(dOᵢ ∘ Oᵢ)"],
    [20, 2, "dS = P ∘ (dP − D)"],
    [21, 2, "write dQᵢ = dQᵢ + dS Kⱼ"],
    [22, 2, "dK = dK + dSᵀ Qᵢ"],
    [23, 1, "end"],
    [24, 1, "write dKⱼ = dK, dVⱼ = dV"],
    [25, 0, "end"],
  ],
  flash2_backward: [
    [3, 0, "dQ = 0 in HBM"],
    [4, 0, "D = rowsum(dO ∘ O); write D"],
    [5, 0, "for j = 1 … Tc"],
    [6, 1, "load Kⱼ, Vⱼ"],
    [7, 1, "dK = 0, dV = 0 on chip"],
    [8, 1, "for i = 1 … Tr"],
    [9, 2, "load Qᵢ, Oᵢ, dOᵢ, dQᵢ, Lᵢ, Dᵢ"],
    [10, 2, "S = Qᵢ Kⱼᵀ"],
    [11, 2, "P = exp(S − Lᵢ)"],
    [12, 2, "dV = dV + Pᵀ dOᵢ"],
    [13, 2, "dP = dOᵢ Vⱼᵀ"],
    [14, 2, "dS = P ∘ (dP − Dᵢ)"],
    [15, 2, "write dQᵢ = dQᵢ + dS Kⱼ"],
    [16, 2, "dK = dK + dSᵀ Qᵢ"],
    [17, 1, "end"],
    [18, 1, "write dKⱼ = dK, dVⱼ = dV"],
    [19, 0, "end"],
  ],
  flash3: [
    [2, 0, "O = 0, ℓ = 0, m = −∞ on chip"],
    [3, 0, "wait for Qᵢ"],
    [7, 0, "for j = 0 … Tc − 1; the first block has no P V before it"],
    [8, 1, "wait for Kⱼ, Vⱼ₋₁: the producer loads them a stage ahead"],
    [9, 1, "order S = Qᵢ Kⱼᵀ, do not wait"],
    [11, 1, "order O = O + P Vⱼ₋₁, do not wait"],
    [13, 1, "m′ = max(m, rowmax(S)), P = exp(S − m′), ℓ = exp(m − m′) ℓ + rowsum(P)"],
    [14, 1, "wait for P Vⱼ₋₁; O = exp(m − m′) O"],
    [15, 1, "release the stages of Kⱼ and Vⱼ₋₁"],
    [17, 0, "end"],
    [19, 0, "O = O + P V of the last block"],
    [20, 0, "write Oᵢ = O / ℓ, Lᵢ = m + log ℓ"],
  ],
  flash_decoding: [
    [1, 0, "for s = 1 … splits, all at the same time"],
    [2, 1, "load Q"],
    [3, 1, "O = 0, ℓ = 0, m = −∞ on chip"],
    [4, 1, "for the blocks j of split s"],
    [5, 2, "load Kⱼ, Vⱼ"],
    [6, 2, "S = Q Kⱼᵀ"],
    [7, 2, "m′ = max(m, rowmax(S)), P = exp(S − m′), ℓ = exp(m − m′) ℓ + rowsum(P)"],
    [8, 2, "O = exp(m − m′) O + P Vⱼ"],
    [9, 1, "end"],
    [10, 1, "write Oₛ = O / ℓ, Lₛ = m + log ℓ"],
    [11, 0, "end"],
    [12, 0, "O = 0, ℓ = 0, m = −∞ on chip"],
    [13, 0, "for s = 1 … splits"],
    [14, 1, "load Oₛ, Lₛ"],
    [15, 1, "m′ = max(m, Lₛ), ℓ = exp(m − m′) ℓ + exp(Lₛ − m′)"],
    [16, 1, "O = exp(m − m′) O + exp(Lₛ − m′) Oₛ"],
    [17, 0, "end"],
    [18, 0, "write O / ℓ, m + log ℓ"],
  ],
  unified_max: [
    [1, 0, "for s = 1 … splits, all at the same time"],
    [2, 1, "load Q"],
    [3, 1, "O = 0, ℓ = 0 on chip"],
    [4, 1, "for the blocks j of split s"],
    [5, 2, "load Kⱼ, Vⱼ"],
    [6, 2, "S = Q Kⱼᵀ − φ; outside of the bounds: note it"],
    [7, 2, "P = exp(S), ℓ = ℓ + rowsum(P)"],
    [8, 2, "O = O + P Vⱼ"],
    [9, 1, "end"],
    [10, 1, "write Oₛ = O, ℓₛ = ℓ"],
    [11, 0, "rows with a score outside of the bounds: again, with the online softmax"],
    [12, 0, "other rows: O = Σ Oₛ / Σ ℓₛ, L = φ + log Σ ℓₛ"],
  ],
  paged: [
    [1, 0, "append k, v to a sequence:"],
    [2, 1, "its last page is full: take a free page into its table"],
    [3, 1, "its last page is shared: copy the page, the copy into its table"],
    [4, 1, "write k, v behind its last token"],
    [5, 0, "fork a sequence: copy its table, count one more reference to each page"],
    [6, 0, "attend with the query q of a sequence:"],
    [7, 1, "load q; O = 0, ℓ = 0, m = −∞ on chip"],
    [8, 1, "for the entries j of its table"],
    [9, 2, "page = table[j]"],
    [10, 2, "load K, V of the page"],
    [11, 2, "S = q Kᵀ"],
    [12, 2, "m′ = max(m, rowmax(S)), P = exp(S − m′), ℓ = exp(m − m′) ℓ + rowsum(P)"],
    [13, 2, "O = exp(m − m′) O + P V"],
    [14, 1, "end"],
    [15, 1, "write O / ℓ, m + log ℓ"],
  ],
};

/** English words of the lines and their Chinese, in the order of replacement. */
const CHINESE = [
  ["append k, v to a sequence:", "向序列追加 k、v："],
  ["its last page is full: take a free page into its table", "最后一页已满：取一个空闲页放进它的块表"],
  ["its last page is shared: copy the page, the copy into its table", "最后一页被共享：复制该页，把副本放进块表"],
  ["write k, v behind its last token", "把 k、v 写在最后一个词元之后"],
  ["fork a sequence: copy its table, count one more reference to each page", "分叉序列：复制块表，每页的引用加一"],
  ["attend with the query q of a sequence:", "用序列的查询 q 计算注意力："],
  ["page = table[j]", "页 = 块表[j]"],
  ["load K, V of the page", "加载该页的 K、V"],
  ["for the entries j of its table", "对块表的每一项 j"],
  ["for the blocks j of split s", "对第 s 份的每一块 j"],
  ["splits, all at the same time", "份数，全部同时进行"],
  ["… splits", "… 份数"],
  ["; the first block has no P V before it", "；第一块之前没有 P V"],
  [": the producer loads them a stage ahead", "：生产者提前一级加载"],
  ["release the stages of Kⱼ and Vⱼ₋₁", "释放 Kⱼ 与 Vⱼ₋₁ 的缓冲级"],
  [" of the last block", "（最后一块）"],
  ["; outside of the bounds: note it", "；超出界限则记下"],
  ["rows with a score outside of the bounds: again, with the online softmax", "有分数超出界限的行：用在线 softmax 重算"],
  ["other rows: ", "其余的行："],
  [", do not wait", "，不等待"],
  ["wait for ", "等待 "],
  ["order ", "发出 "],
  [" by blocks", "（分块）"],
  [/ in (T[rc]) blocks/g, " 分为 $1 块"],
  [" in HBM", "（在 HBM 中）"],
  [" on chip", "（在片上）"],
  [/^end$/g, "结束"],
  ["for ", "对 "],
  ["load ", "加载 "],
  ["read ", "读取 "],
  ["write ", "写回 "],
  ["return ", "返回 "],
  ["; ", "；"],
];

const inChinese = (text) => CHINESE.reduce((line, [english, chinese]) => line.replaceAll(english, chinese), text);

class PseudocodeView {
  constructor(root, language) {
    this.language = language;
    this.root = root.querySelector(".code");
    this.paper = this.root.querySelector("h3");
    this.list = this.root.querySelector("ol");
  }

  show({ recording }) {
    const lines = PSEUDOCODE[recording.algorithm];
    const inLanguage = this.language.name === "zh" ? inChinese : (text) => text;
    this.lit = undefined;
    setText(this.paper, paperName(PAPERS[recording.algorithm][0], this.language));
    this.lines = new Map(lines.map(([number, depth, text]) => [number, element("li", { value: number, "data-line": number, style: `--depth:${depth}` }, inLanguage(text))]));
    this.list.replaceChildren(...this.lines.values());
  }

  /** `line` of lineOf, or null. */
  draw(line) {
    const now = line ? this.lines.get(line.line) : undefined;
    if (now === this.lit) return;
    this.lit?.removeAttribute("aria-current");
    now?.setAttribute("aria-current", "step");
    this.lit = now;
  }
}
