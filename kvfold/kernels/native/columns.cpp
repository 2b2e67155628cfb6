// SPDX-License-Identifier: Apache-2.0
// Causal attention of many queries, and what each entry receives of it, in one pass: sums (H2O, D2O),
// or maxima of a second softmax over the scored entries alone (KVzip).

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t HEIGHT = 6;                // rows whose sums stay in registers,
constexpr int VECTORS = WIDE == 16 ? 4 : 2;  // with as many vectors each
constexpr int64_t PANEL = VECTORS * WIDE;    // keys that lie together
constexpr int64_t ROWS = 4 * HEIGHT;         // queries that read all observed entries at once
constexpr int64_t TIMES = 8;                 // as many times ROWS read the others, tile by tile
constexpr int64_t TILE = 256;                // entries
constexpr int64_t DEPTH = 128;               // values that are added at a time
constexpr int64_t SPANS = 8;                 // of a head's queries: no result depends on threads
// Where a row's maximum begins. Finite: so a first tile of −∞ logits has exp(−∞) = 0, and not NaN.
constexpr float LOWEST = std::numeric_limits<float>::lowest();

static_assert(HEIGHT == 6 && VECTORS <= 4, "loops of `multiply` are unrolled for them");

// What entries receive: sums of weights, these and squares of groups' sums, maxima, or sums of squares.
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
    int64_t heads, groups, queries, stored, size, value_size;
};

// What is observed. `shown` [B, T], `scored` [B, T], `counted` [B, S], `row_weights` [B, S] and
// `column_weights` [B, Hq, T], each or null.
struct Observation {
    Kind kind;
    const uint8_t *shown, *scored, *counted;
    const float *row_weights, *column_weights;
};

// Entries of a batch's row that are shown, in their order: those that are observed, or the others.
struct Entries {
    std::vector<int64_t> places, before;  // before: how many there are before each of the row's

    Entries(const uint8_t* shown, const uint8_t* scored, bool are_scored, int64_t stored) {
        for (int64_t i = 0; i < stored; i++) {
            before.push_back(places.size());
            if ((!shown || shown[i]) && (!scored || scored[i]) == are_scored) places.push_back(i);
        }
        before.push_back(places.size());
    }
};

// A head's entries: keys, PANEL side by side with zeros behind the last one, and values.
struct Packed {
    const Entries* entries;
    std::vector<float> panels, copied;  // memory that the next head uses again
    const float* values;
    int64_t value_step;

    void pack(const Entries& of_row, const Heads& key, const Heads& value, int64_t row,
              int64_t head, const Sizes& sizes) {
        entries = &of_row;
        panels.resize(up_to(count(), PANEL) * sizes.size);
        for (int64_t i = 0; i < up_to(count(), PANEL); i++) {
            float* panel = &panels[i / PANEL * PANEL * sizes.size + i % PANEL];
            const float* from = i < count() ? key.at(row, head, entries->places[i]) : nullptr;
            for (int64_t d = 0; d < sizes.size; d++) panel[d * PANEL] = from ? from[d] : 0.0f;
        }
        if (count() == sizes.stored) {
            values = value.at(row, head, 0);
            value_step = value.steps[2];
            return;
        }
        value_step = sizes.value_size;
        copied.resize(count() * value_step);
        for (int64_t i = 0; i < count(); i++)
            std::copy_n(value.at(row, head, entries->places[i]), value_step,
                        &copied[i * value_step]);
        values = copied.data();
    }

    int64_t count() const { return entries->places.size(); }

    // How many are among the first `visible` of a row.
    int64_t seen(int64_t visible) const { return entries->before[visible]; }
};

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

// What each observed entry receives of some queries. Squares are null unless they are observed too.
struct Received {
    float *sums, *squares;
};

// A head's entries, and what the observed ones receive of each span.
struct Head {
    int64_t row, head;
    Packed observed, others;
    std::vector<float> sums, squares, column_weights;  // column_weights [groups, observed], or none

    void begin(int64_t index, const std::vector<Entries>& scored, const std::vector<Entries>& rest,
               const Heads& key, const Heads& value, const Sizes& sizes, const Observation& what) {
        row = index / sizes.heads, head = index % sizes.heads;
        observed.pack(scored[row], key, value, row, head, sizes);
        others.pack(rest[row], key, value, row, head, sizes);
        sums.assign(SPANS * observed.count(), 0.0f);
        squares.assign(what.kind == SQUARES ? sums.size() : 0, 0.0f);
        column_weights.clear();
        for (int64_t g = 0; what.column_weights && g < sizes.groups; g++) {
            const int64_t query_head = index * sizes.groups + g;
            for (const int64_t i : observed.entries->places)
                column_weights.push_back(what.column_weights[query_head * sizes.stored + i]);
        }
    }

    Received of_span(int64_t span) {
        const int64_t at = span * observed.count();
        return {sums.data() + at, squares.empty() ? nullptr : squares.data() + at};
    }

    // Of all spans, to their places of the head's entries.
    void give(Kind kind, Received into) {
        for (int64_t span = 0; span < SPANS; span++) {
            const Received from = of_span(span);
            for (int64_t i = 0; i < observed.count(); i++) {
                const int64_t place = observed.entries->places[i];
                float& sum = into.sums[place];
                sum = kind == MAXIMA ? std::max(sum, from.sums[i]) : sum + from.sums[i];
                if (from.squares) into.squares[place] += from.squares[i];
            }
        }
    }
};

// One head's queries of a span, block by block. Softmax is online: each tile of entries rescales
// what those before it gave. The first tile is all observed entries: so they have a softmax of
// their own.
class Span {
    const Sizes& sizes;
    const Observation& what;
    const Packed &observed, &others;
    const std::vector<float>& column_weights;
    const int64_t row, head;
    const int64_t few, many, height;  // tokens of ROWS and of TIMES as many; rows of the few
    std::vector<float> asked, weights, mixed, most, total;
    std::vector<float> factors, sums, squares, of_group;

  public:
    Span(const Sizes& sizes, const Observation& what, const Head& own)
        : sizes(sizes), what(what), observed(own.observed), others(own.others),
          column_weights(own.column_weights), row(own.row), head(own.head),
          few(std::max(int64_t(1), ROWS / sizes.groups)),
          many(others.count() ? std::min(TIMES * few, up_to(sizes.queries / SPANS + 1, few)) : few),
          height(up_to(few * sizes.groups, HEIGHT)), asked(place(many) * sizes.size),
          weights(std::max(height * step_of(observed.count()), place(many) * step_of(TILE))),
          mixed(place(many) * sizes.value_size), most(place(many)), total(place(many)),
          factors(sizes.groups), sums(observed.count()),
          squares(what.kind == SQUARES ? sums.size() : 0),
          of_group(what.kind == SUMS || what.kind == SQUARES ? sums.size() : 0) {}

    // Attends from queries `first` to `last`.
    void run(const Heads& query, float scale, int64_t first, int64_t last, float* out,
             Received into) {
        for (int64_t begin = first; begin < last; begin += many) {
            const int64_t end = std::min(last, begin + many);
            ask(query, scale, begin, end);
            for (int64_t token = begin; token < end; token += few) {
                const int64_t until = std::min(end, token + few);
                attend(observed, begin, token, until, 0, observed.count());
                gather(observed.seen(visible(until - 1)), into);
            }
            const int64_t seen = others.seen(visible(end - 1));
            for (int64_t tile = 0; tile < seen; tile += TILE)
                attend(others, begin, begin, end, tile, tile + TILE);
            write(begin, end, out);
        }
    }

  private:
    // Entries up to a token's own.
    int64_t visible(int64_t token) const { return sizes.stored - sizes.queries + token + 1; }

    // Row of a block's token: each `few` begin at a multiple of HEIGHT.
    int64_t place(int64_t token) const { return token / few * height + token % few * sizes.groups; }

    // From a row's weights of `count` entries to the next row's, which a cache keeps elsewhere.
    static int64_t step_of(int64_t count) { return up_to(count, PANEL) + WIDE; }

    // Queries token by token, the heads of a group together, between them zeros; no entry seen yet.
    void ask(const Heads& query, float scale, int64_t begin, int64_t end) {
        std::fill(asked.begin(), asked.end(), 0.0f);
        std::fill(mixed.begin(), mixed.end(), 0.0f);
        std::fill(most.begin(), most.end(), LOWEST);
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t token = begin; token < end; token++)
            for (int64_t g = 0; g < sizes.groups; g++) {
                const float* from = query.at(row, head * sizes.groups + g, token);
                float* into = &asked[(place(token - begin) + g) * sizes.size];
                for (int64_t d = 0; d < sizes.size; d++) into[d] = from[d] * scale;
            }
    }

    // Tokens `token` to `until` of the block from `begin` on attend to entries `first` to `last`, as
    // far as they see them.
    void attend(const Packed& packed, int64_t begin, int64_t token, int64_t until, int64_t first,
                int64_t last) {
        last = std::min(last, packed.seen(visible(until - 1)));
        const int64_t at = place(token - begin), step = step_of(last - first);
        const int64_t rows = up_to(place(until - 1 - begin) + sizes.groups - at, HEIGHT);
        for (int64_t column = first; column < last; column += PANEL)
            for (int64_t i = 0; i < rows; i += HEIGHT)
                multiply<VECTORS>(&asked[(at + i) * sizes.size], sizes.size,
                                  &packed.panels[column * sizes.size], PANEL, sizes.size,
                                  &weights[i * step + column - first], step, false);
        for (; token < until; token++) {
            const int64_t own = place(token - begin);
            const int64_t seen = packed.seen(visible(token)) - first;
            const int64_t count = real(token) ? std::clamp(seen, int64_t(0), last - first) : 0;
            float* rows_of_token = &weights[(own - at) * step];
            for (int64_t g = 0; g < sizes.groups; g++) {
                float* of_row = rows_of_token + g * step;
                weigh(own + g, of_row, count);
                std::fill(of_row + count, of_row + last - first, 0.0f);
            }
            if (&packed == &observed) observe(token, own, rows_of_token, step, count);
        }
        mix(packed, at, rows, step, first, last);
    }

    // Padding sees nothing and is not seen.
    bool real(int64_t token) const {
        const int64_t own = row * sizes.stored + visible(token) - 1;
        return !what.shown || what.shown[own];
    }

    // A row's logits of a tile become weights beside those of the tiles before.
    void weigh(int64_t at, float* own, int64_t count) {
        const float highest = most_of(own, count, most[at]);
        if (highest > most[at]) {
            const float left = exponential(most[at] - highest);
            float* mixture = &mixed[at * sizes.value_size];
            for (int64_t j = 0; j < sizes.value_size; j++) mixture[j] *= left;
            total[at] *= left;
            most[at] = highest;
        }
        total[at] += exponentials(own, count, highest, own);
    }

    // Adds a token's weights to the sums of its block, or raises these. `own`: its first row. Weights
    // that are not numbers give nothing.
    void observe(int64_t token, int64_t own, const float* of_token, int64_t step, int64_t count) {
        const int64_t at = row * sizes.queries + token;
        if (what.counted && !what.counted[at]) return;
        const float weight = what.row_weights ? what.row_weights[at] : 1.0f;
        for (int64_t g = 0; g < sizes.groups; g++)
            factors[g] = total[own + g] > 0 ? weight / total[own + g] : 0.0f;
        if (what.kind == SUMS || what.kind == SQUARES) {
            add_groups(of_token, step, count);
            return;
        }
        const auto add = what.kind == MAXIMA ? raise : add_squares;
        const float* by_column = column_weights.empty() ? nullptr : column_weights.data();
        for (int64_t g = 0; g < sizes.groups; g++) {
            if (factors[g] != 0) add(of_token + g * step, count, factors[g], by_column, sums.data());
            if (by_column) by_column += observed.count();
        }
    }

    // Sums of a group's weights, and squares of these.
    void add_groups(const float* of_token, int64_t step, int64_t count) {
        std::fill_n(of_group.begin(), count, 0.0f);
        float *group = of_group.data(), *into = sums.data(), *beside = squares.data();
        for (int64_t g = 0; g < sizes.groups; g++) {
            if (factors[g] == 0) continue;
            const float *own = of_token + g * step, factor = factors[g];
#pragma omp simd
            for (int64_t i = 0; i < count; i++) group[i] += own[i] * factor;
        }
#pragma omp simd
        for (int64_t i = 0; i < count; i++) into[i] += group[i];
        if (what.kind == SQUARES)
#pragma omp simd
            for (int64_t i = 0; i < count; i++) beside[i] += group[i] * group[i];
    }

    // The few tokens' sums go to the span's: so thousands of small numbers lose little.
    void gather(int64_t seen, Received into) {
        if (what.kind == MAXIMA)
            raise(sums.data(), seen, 1, nullptr, into.sums);
        else
            for (int64_t i = 0; i < seen; i++) into.sums[i] += sums[i];
        std::fill_n(sums.begin(), seen, 0.0f);
        if (!into.squares) return;
        for (int64_t i = 0; i < seen; i++) into.squares[i] += squares[i];
        std::fill_n(squares.begin(), seen, 0.0f);
    }

    // Adds values of entries `first` to `last` by the rows' weights.
    void mix(const Packed& packed, int64_t at, int64_t rows, int64_t step, int64_t first,
             int64_t last) {
        const int64_t size = sizes.value_size, from = packed.value_step;
        for (int64_t begin = first; begin < last; begin += DEPTH) {
            const int64_t depth = std::min(DEPTH, last - begin);
            const float* right = packed.values + begin * from;
            for (int64_t i = 0; i < rows; i += HEIGHT) {
                const float* left = &weights[i * step + begin - first];
                float* into = &mixed[(at + i) * size];
                int64_t j = 0;
                for (; j + PANEL <= size; j += PANEL)
                    multiply<VECTORS>(left, step, right + j, from, depth, into + j, size, true);
                for (; j < size; j += WIDE)
                    multiply<1>(left, step, right + j, from, depth, into + j, size, true);
            }
        }
    }

    // Outputs [B, S, Hq, Dv] of a block's tokens.
    void write(int64_t begin, int64_t end, float* out) const {
        const int64_t size = sizes.value_size;
        for (int64_t token = begin; token < end; token++)
            for (int64_t g = 0; g < sizes.groups; g++) {
                const int64_t at = place(token - begin) + g;
                const int64_t query = (row * sizes.queries + token) * sizes.heads + head;
                const float share = total[at] == 0 ? 0.0f : 1 / total[at];
                float* into = out + (query * sizes.groups + g) * size;
                for (int64_t j = 0; j < size; j++) into[j] = mixed[at * size + j] * share;
            }
    }
};

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
    const Sizes sizes{heads, groups, queries, stored, size, value_size};
    const Observation what{Kind(kind), shown, scored, counted, row_weights, column_weights};
    const Heads of_query{query, query_steps}, of_key{key, key_steps}, of_value{value, value_steps};
    std::vector<Entries> observed, others;
    for (int64_t row = 0; row < batch; row++) {
        const uint8_t* of_row = shown ? shown + row * stored : nullptr;
        const uint8_t* chosen = scored ? scored + row * stored : nullptr;
        observed.emplace_back(of_row, chosen, true, stored);
        others.emplace_back(of_row, chosen, false, stored);
    }
    // As many heads at a time as there are threads: copies of all would be as large as the layer.
    std::vector<Head> at_work(std::min(threads, batch * heads));
    for (int64_t begin = 0; begin < batch * heads; begin += threads) {
        const int64_t count = std::min(threads, batch * heads - begin);
#pragma omp parallel for num_threads(threads)
        for (int64_t i = 0; i < count; i++)
            at_work[i].begin(begin + i, observed, others, of_key, of_value, sizes, what);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int64_t item = 0; item < count * SPANS; item++) {
            // The last queries see most entries: they come first, so that no thread ends late.
            const int64_t span = SPANS - 1 - item / count;
            Head& own = at_work[item % count];
            Span(sizes, what, own).run(of_query, scale, span * queries / SPANS,
                                       (span + 1) * queries / SPANS, out, own.of_span(span));
        }
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = (begin + i) * stored;
            at_work[i].give(what.kind, {first + at, second ? second + at : nullptr});
        }
    }
}
}
