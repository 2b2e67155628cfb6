// SPDX-License-Identifier: Apache-2.0
// Causal attention of many queries, and what each entry receives of it, in one pass: sums (H2O, D2O),
// or maxima of a second softmax over the scored entries alone (KVzip).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t HEIGHT = 6;                // rows whose sums stay in registers,
constexpr int VECTORS = WIDE == 16 ? 4 : 2;  // with as many vectors each
constexpr int64_t PANEL = VECTORS * WIDE;    // keys that lie together
constexpr int64_t ROWS = 4 * HEIGHT;         // queries of a block, if a group has no more
constexpr int64_t DEPTH = 128;               // values that are added at a time
constexpr int64_t SPANS = 8;                 // of a head's queries: no result depends on threads
constexpr float FAR = 30;  // logits below a row's highest, where weights lose what tells them apart

enum Kind : int64_t { SUMS, SQUARES, MAXIMA, MEAN_SQUARES };

int64_t up_to(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

// Adds products of HEIGHT rows and `depth` rows of V vectors to `out`, or puts them there.
template <int V>
void multiply(const float* left, int64_t left_step, const float* right, int64_t right_step,
              int64_t depth, float* out, int64_t out_step, bool add) {
    Floats sums[HEIGHT][V];
#pragma GCC unroll 6
    for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
            sums[i][v] = add ? loaded(out + i * out_step + v * WIDE) : Floats{};
    for (int64_t d = 0; d < depth; d++) {
        Floats own[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) own[v] = loaded(right + d * right_step + v * WIDE);
#pragma GCC unroll 6
        for (int i = 0; i < HEIGHT; i++) {
            const float factor = left[i * left_step + d];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sums[i][v] += factor * own[v];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < HEIGHT; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + i * out_step + v * WIDE, sums[i][v]);
}

// Numbers of heads of rows, and how far apart those of a batch's row, a head and a token are.
struct Heads {
    const float* numbers;
    const int64_t* steps;

    const float* at(int64_t row, int64_t head, int64_t token) const {
        return numbers + row * steps[0] + head * steps[1] + token * steps[2];
    }
};

struct Sizes {
    int64_t batch, heads, groups, queries, stored, size, value_size;
};

// What is observed. `shown` [B, T], `scored` [B, T], `counted` [B, S], `row_weights` [B, S] and
// `column_weights` [B, Hq, T], each or null.
struct Observed {
    Kind kind;
    const uint8_t *shown, *scored, *counted;
    const float *row_weights, *column_weights;
};

using Ranges = std::vector<std::pair<int64_t, int64_t>>;

// Ranges of a row's entries that both masks have; null: all.
Ranges ranges_of(const uint8_t* one, const uint8_t* other, int64_t count) {
    const auto there = [&](int64_t i) { return (!one || one[i]) && (!other || other[i]); };
    Ranges found;
    for (int64_t i = 0; i < count; i++) {
        if (!there(i)) continue;
        const int64_t first = i;
        while (i < count && there(i)) i++;
        found.push_back({first, i});
    }
    return found;
}

// Calls `part` with the ranges' parts before `end`.
template <typename Part>
void before(const Ranges& ranges, int64_t end, Part part) {
    for (const auto& [first, last] : ranges)
        if (first < end) part(first, std::min(last, end));
}

// Raises numbers to those of a row times a factor, and times other factors if there are any.
void raise(const float* row, int64_t count, float factor, const float* others, float* into) {
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE) {
        const Floats own = loaded(row + i) * factor;
        store(into + i, higher(others ? own * loaded(others + i) : own, loaded(into + i)));
    }
    for (; i < count; i++)
        into[i] = higher(others ? row[i] * factor * others[i] : row[i] * factor, into[i]);
}

// As `raise`, but adds squares.
void add_squares(const float* row, int64_t count, float factor, const float* others, float* into) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const float own = others ? row[i] * factor * others[i] : row[i] * factor;
        into[i] += own * own;
    }
}

// One head's queries of a span, block by block.
class Span {
    const Sizes& sizes;
    const Observed& seen_by;
    const int64_t row, head, tokens, step;
    const uint8_t* shown;
    Ranges ranges, shown_ranges;
    std::vector<float> asked, weights, apart, mixed, sums, squares, of_group;
    std::vector<float> shares, factors;
    std::vector<const float*> received;

  public:
    Span(const Sizes& sizes, const Observed& seen_by, int64_t row, int64_t head)
        : sizes(sizes), seen_by(seen_by), row(row), head(head),
          shown(seen_by.shown ? seen_by.shown + row * sizes.stored : nullptr), tokens(std::max(int64_t(1), ROWS / sizes.groups)),
          step(up_to(sizes.stored, PANEL) + WIDE), asked(rows() * sizes.size),
          weights(rows() * step), mixed(rows() * sizes.value_size), sums(sizes.stored),
          squares(sizes.stored), of_group(sizes.stored), shares(rows()), factors(sizes.groups),
          received(sizes.groups) {
        shown_ranges = ranges_of(shown, nullptr, sizes.stored);
        if (seen_by.scored)
            ranges = ranges_of(shown, seen_by.scored + row * sizes.stored, sizes.stored);
    }

    // Attends from queries `first` to `last`; adds what entries receive to `into` and `beside` [T].
    void run(const Heads& query, const float* panels, const Heads& value, float scale, int64_t first,
             int64_t last, float* out, float* into, float* beside) {
        for (int64_t begin = first; begin < last; begin += tokens) {
            const int64_t end = std::min(last, begin + tokens);
            const int64_t seen = sizes.stored - sizes.queries + end;
            const int64_t own = up_to((end - begin) * sizes.groups, HEIGHT);
            ask(query, scale, begin, end, own);
            for (int64_t column = 0; column < seen; column += PANEL)
                for (int64_t i = 0; i < own; i += HEIGHT)
                    multiply<VECTORS>(&asked[i * sizes.size], sizes.size,
                                      panels + column * sizes.size, PANEL, sizes.size,
                                      &weights[i * step + column], step, false);
            std::fill_n(sums.begin(), seen, 0.0f);
            std::fill_n(squares.begin(), seen, 0.0f);
            for (int64_t token = begin; token < end; token++) weigh(token, begin, seen);
            gather(seen, into, beside);
            mix(value, seen, own);
            for (int64_t token = begin; token < end; token++) give(token, begin, out);
        }
    }

  private:
    int64_t rows() const { return up_to(tokens * sizes.groups, HEIGHT); }

    // Queries token by token, the heads of a group together, then zeros.
    void ask(const Heads& query, float scale, int64_t begin, int64_t end, int64_t own) {
        float* into = asked.data();
        for (int64_t token = begin; token < end; token++)
            for (int64_t g = 0; g < sizes.groups; g++, into += sizes.size) {
                const float* from = query.at(row, head * sizes.groups + g, token);
                for (int64_t d = 0; d < sizes.size; d++) into[d] = from[d] * scale;
            }
        std::fill(into, asked.data() + own * sizes.size, 0.0f);
    }

    // Softmax of a token's rows, and what entries receive of them.
    void weigh(int64_t token, int64_t begin, int64_t seen) {
        const int64_t visible = sizes.stored - sizes.queries + token + 1;
        const bool real = !shown || shown[visible - 1];
        const bool counts =
            real && (!seen_by.counted || seen_by.counted[row * sizes.queries + token]);
        const float weight =
            seen_by.row_weights ? seen_by.row_weights[row * sizes.queries + token] : 1.0f;
        for (int64_t g = 0; g < sizes.groups; g++) {
            const int64_t at = (token - begin) * sizes.groups + g;
            float *own = &weights[at * step], share = 0, most = NOTHING, total = 0;
            received[g] = own;
            shares[at] = factors[g] = 0;
            if (!real) {
                std::fill_n(own, seen, 0.0f);
                continue;
            }
            before(shown_ranges, visible, [&](int64_t first, int64_t last) {
                most = most_of(own + first, last - first, most);
            });
            if (counts && seen_by.scored) share = far_below(own, visible, most, g);
            int64_t hidden = 0;
            before(shown_ranges, visible, [&](int64_t first, int64_t last) {
                std::fill(own + hidden, own + first, 0.0f);
                total += exponentials(own + first, last - first, most, own + first);
                hidden = last;
            });
            std::fill(own + hidden, own + seen, 0.0f);
            shares[at] = 1 / total;
            if (!seen_by.scored)
                share = total;
            else if (counts && received[g] == own)
                share = share_of(own, visible);
            factors[g] = counts && share > 0 ? weight / share : 0.0f;
        }
        if (counts) observe(visible);
    }

    // Sum of the scored weights of a row.
    float share_of(const float* own, int64_t visible) const {
        float share = 0;
        before(ranges, visible, [&](int64_t first, int64_t last) {
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t i = first; i < last; i++) part += own[i];
            share += part;
        });
        return share;
    }

    // Where scored logits are all far below a row's highest, their weights and these weights' sum.
    float far_below(const float* own, int64_t visible, float most, int64_t g) {
        float of_scored = NOTHING, share = 0;
        before(ranges, visible, [&](int64_t first, int64_t last) {
            of_scored = most_of(own + first, last - first, of_scored);
        });
        if (!(of_scored < most - FAR) || of_scored == NOTHING) return 0;
        apart.resize(sizes.groups * step);
        before(ranges, visible, [&](int64_t first, int64_t last) {
            share += exponentials(own + first, last - first, of_scored, &apart[g * step + first]);
        });
        received[g] = &apart[g * step];
        return share;
    }

    // Adds a token's weights to the block's sums, or raises these.
    void observe(int64_t visible) {
        if (!seen_by.scored) {
            observe_all(visible);
            return;
        }
        const auto add = seen_by.kind == MAXIMA ? raise : add_squares;
        for (int64_t g = 0; g < sizes.groups; g++) {
            const int64_t query_head = (row * sizes.heads + head) * sizes.groups + g;
            const float* others = seen_by.column_weights;
            if (others) others += query_head * sizes.stored;
            before(ranges, visible, [&](int64_t first, int64_t last) {
                add(received[g] + first, last - first, factors[g],
                    others ? others + first : nullptr, &sums[first]);
            });
        }
    }

    void observe_all(int64_t visible) {
        std::fill_n(of_group.begin(), visible, 0.0f);
        float *group = of_group.data(), *into = sums.data(), *beside = squares.data();
        for (int64_t g = 0; g < sizes.groups; g++) {
            const float *own = received[g], factor = factors[g];
#pragma omp simd
            for (int64_t i = 0; i < visible; i++) group[i] += own[i] * factor;
        }
#pragma omp simd
        for (int64_t i = 0; i < visible; i++) into[i] += group[i];
        if (seen_by.kind == SQUARES)
#pragma omp simd
            for (int64_t i = 0; i < visible; i++) beside[i] += group[i] * group[i];
    }

    void gather(int64_t seen, float* into, float* beside) const {
        if (seen_by.kind == MAXIMA)
            raise(sums.data(), seen, 1, nullptr, into);
        else
            for (int64_t i = 0; i < seen; i++) into[i] += sums[i];
        if (seen_by.kind == SQUARES)
            for (int64_t i = 0; i < seen; i++) beside[i] += squares[i];
    }

    // Values of `seen` entries by the block's weights.
    void mix(const Heads& value, int64_t seen, int64_t own) {
        const int64_t size = sizes.value_size, row_step = value.steps[2];
        for (int64_t first = 0; first < seen; first += DEPTH) {
            const int64_t depth = std::min(DEPTH, seen - first);
            const float* right = value.at(row, head, first);
            for (int64_t i = 0; i < own; i += HEIGHT) {
                const float* left = &weights[i * step + first];
                float* into = &mixed[i * size];
                int64_t j = 0;
                for (; j + PANEL <= size; j += PANEL)
                    multiply<VECTORS>(left, step, right + j, row_step, depth, into + j, size, first);
                for (; j < size; j += WIDE)
                    multiply<1>(left, step, right + j, row_step, depth, into + j, size, first);
            }
        }
    }

    // Outputs [B, S, Hq, Dv] of a token's rows.
    void give(int64_t token, int64_t begin, float* out) const {
        const int64_t size = sizes.value_size, groups = sizes.groups;
        out += ((row * sizes.queries + token) * sizes.heads + head) * groups * size;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = (token - begin) * groups + g;
            for (int64_t j = 0; j < size; j++) out[g * size + j] = mixed[at * size + j] * shares[at];
        }
    }
};

// A head's keys, PANEL side by side, with zeros behind the last one.
void pack(const Heads& key, int64_t row, int64_t head, const Sizes& sizes, float* panels) {
    for (int64_t first = 0; first < sizes.stored; first += PANEL, panels += PANEL * sizes.size)
        for (int64_t i = 0; i < PANEL; i++) {
            const bool there = first + i < sizes.stored;
            const float* own = there ? key.at(row, head, first + i) : nullptr;
            for (int64_t d = 0; d < sizes.size; d++) panels[d * PANEL + i] = there ? own[d] : 0.0f;
        }
}

}  // namespace

extern "C" {

int64_t vector_width() { return WIDE; }

// 1 if each of `queries` rows of a mask shows, of T entries up to its own, those that the last row
// shows, and no later ones. Rows whose own entry both hide are padding, and may show any others; an
// own entry that the last row alone hides is another text's (packed ones), or left a window.
int64_t is_causal(const uint8_t* mask, int64_t step, int64_t queries, int64_t stored) {
    const uint8_t* shown = mask + (queries - 1) * step;
    if (!shown[stored - 1]) return 0;
    for (int64_t i = 0; i < queries; i++) {
        const uint8_t* own = mask + i * step;
        const int64_t seen = stored - queries + i + 1;
        if (!shown[seen - 1] && !own[seen - 1]) continue;
        uint8_t differs = 0, later = 0;
        for (int64_t j = 0; j < seen; j++) differs |= own[j] ^ shown[j];
        for (int64_t j = seen; j < stored; j++) later |= own[j];
        if (differs || later) return 0;
    }
    return 1;
}

// Queries [B, Hq, S, D] are the last of T entries, of which they see those `shown`, up to their own;
// hidden ones see none. out [B, S, Hq, Dv], where WIDE divides Dv. What entries receive [B, H, T]:
// `first` of `kind`, and `second` the sums of squares of sums of groups.
void attend_with_columns(const float* query, const int64_t* query_steps, const float* key,
                         const int64_t* key_steps, const float* value, const int64_t* value_steps,
                         const uint8_t* shown, const uint8_t* scored, const uint8_t* counted,
                         const float* row_weights, const float* column_weights, float* out,
                         float* first, float* second, int64_t kind, int64_t batch, int64_t heads,
                         int64_t groups, int64_t queries, int64_t stored, int64_t size,
                         int64_t value_size, float scale, int64_t threads) {
    const Sizes sizes{batch, heads, groups, queries, stored, size, value_size};
    const Observed seen_by{Kind(kind), shown, scored, counted, row_weights, column_weights};
    const Heads of_query{query, query_steps}, of_key{key, key_steps}, of_value{value, value_steps};
    const int64_t length = up_to(stored, PANEL) * size, all = batch * heads;
    std::vector<float> panels(all * length), sums(all * SPANS * stored),
        squares(kind == SQUARES ? sums.size() : 0);
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < all; i++) pack(of_key, i / heads, i % heads, sizes, &panels[i * length]);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t item = 0; item < all * SPANS; item++) {
        // The last queries see most entries: they come first, so that no thread ends late.
        const int64_t i = item % all, part = SPANS - 1 - item / all;
        const int64_t begin = part * queries / SPANS, end = (part + 1) * queries / SPANS;
        const int64_t at = (i * SPANS + part) * stored;
        Span(sizes, seen_by, i / heads, i % heads)
            .run(of_query, &panels[i * length], of_value, scale, begin, end, out, &sums[at],
                 kind == SQUARES ? &squares[at] : nullptr);
    }
    for (int64_t i = 0; i < all; i++)
        for (int64_t part = 0; part < SPANS; part++)
            for (int64_t j = 0; j < stored; j++) {
                const int64_t at = (i * SPANS + part) * stored + j;
                float& sum = first[i * stored + j];
                sum = kind == MAXIMA ? std::max(sum, sums[at]) : sum + sums[at];
                if (kind == SQUARES) second[i * stored + j] += squares[at];
            }
}
}
