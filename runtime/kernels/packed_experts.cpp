#include "packed_experts.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace kvgraph {

namespace {
// Choices that are computed together: a longer prompt has its tokens in several steps, which bounds memory.
// By then an expert's weights are read for so many rows that reading them again costs little.
constexpr int64_t kMostChoices = 8192;
// Numbers that one thread has added before another is awake.
constexpr int64_t kSmallSum = 1 << 14;
}  // namespace

// Tokens that are computed together.
struct PackedExperts::Step {
    int64_t tokens, top_k;
    const float* x;
    const int64_t* chosen;
    const float* weights;
    const float* residual;
    float* output;
};

// The choices of a step, sorted by expert; those of one expert stay in the order of tokens.
struct PackedExperts::Choices {
    std::vector<int64_t> experts;  // that were chosen, rising
    std::vector<int64_t> rows;     // of each of them
    std::vector<int64_t> token;    // of each sorted choice
    std::vector<int64_t> place;    // of each choice when sorted, [tokens, k]
    std::vector<int64_t> next;     // where each expert's next choice goes
};

PackedExperts::PackedExperts(const Attributes& attributes)
    : num_experts_(attributes.integer("num_experts")),
      hidden_size_(attributes.integer("hidden_size")),
      intermediate_size_(attributes.integer("intermediate_size")),
      gate_up_(attributes, "", hidden_size_, 2 * intermediate_size_,
               parse_activation(attributes.text("gate")), kNone),
      down_(attributes, "down_", intermediate_size_, hidden_size_, kNone, kNone) {
    if (gate_up_.width() != intermediate_size_) throw std::invalid_argument("gate is missing");
}

void PackedExperts::check(const Call& call) const {
    const Tensor x = call.input(0), chosen = call.input(1), weights = call.input(2), gate_up = call.input(3),
                 down = call.input(4), residual = call.input(5);
    if (x.shape.empty() || x.shape.back() != hidden_size_)
        throw std::invalid_argument("input is not as wide as hidden_size");
    if (chosen.shape.empty() || chosen.rows() != x.rows() || weights.shape != chosen.shape)
        throw std::invalid_argument("chosen experts and their weights are not of one shape and of x's rows");
    if (gate_up.shape.size() != 1 || gate_up.shape[0] != num_experts_ * gate_up_.weight_bytes() ||
        down.shape.size() != 1 || down.shape[0] != num_experts_ * down_.weight_bytes())
        throw std::invalid_argument("weights are not as long as their shape and format say");
    if (residual.data != nullptr && residual.shape != x.shape)
        throw std::invalid_argument("residual has another shape than the result");
}

void PackedExperts::run(const Call& call) const {
    check(call);
    const Tensor x = call.input(0), chosen = call.input(1), weights = call.input(2), residual = call.input(5);
    auto* output = static_cast<float*>(call.output(0, x.shape));
    const int64_t tokens = x.rows(), top_k = chosen.shape.back();
    const int64_t together = std::max<int64_t>(1, kMostChoices / std::max<int64_t>(1, top_k));
    thread_local Choices reused;
    thread_local Scratch scratch;
    Choices& choices = reused;
    for (int64_t first = 0; first < tokens; first += together) {
        const int64_t count = std::min(together, tokens - first), start = first * hidden_size_;
        const Step step{count,
                        top_k,
                        x.as<float>() + start,
                        chosen.as<int64_t>() + first * top_k,
                        weights.as<float>() + first * top_k,
                        residual.data == nullptr ? nullptr : residual.as<float>() + start,
                        output + start};
        sort(step, choices);
        const int64_t rows = count * top_k;
        auto* inner = static_cast<float*>(
            scratch.reserve(static_cast<size_t>(rows * (hidden_size_ + intermediate_size_)) * sizeof(float)));
        float* outputs = inner + rows * intermediate_size_;
        multiply(call, gate_up_, call.input(3).as<uint8_t>(), step.x, choices.token.data(), choices, inner);
        multiply(call, down_, call.input(4).as<uint8_t>(), inner, nullptr, choices, outputs);
        add(call, step, choices, outputs);
    }
}

void PackedExperts::sort(const Step& step, Choices& choices) const {
    const int64_t count = step.tokens * step.top_k;
    std::vector<int64_t>& next = choices.next;
    next.assign(static_cast<size_t>(num_experts_), 0);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t expert = step.chosen[i];
        if (expert < 0 || expert >= num_experts_) {
            throw std::invalid_argument("expert " + std::to_string(expert) + " is chosen, expected 0 to " +
                                        std::to_string(num_experts_ - 1));
        }
        ++next[static_cast<size_t>(expert)];
    }
    choices.experts.clear();
    choices.rows.clear();
    int64_t start = 0;
    for (int64_t expert = 0; expert < num_experts_; ++expert) {
        int64_t& at = next[static_cast<size_t>(expert)];
        const int64_t rows = at;
        at = start;
        start += rows;
        if (rows == 0) continue;
        choices.experts.push_back(expert);
        choices.rows.push_back(rows);
    }
    choices.token.resize(static_cast<size_t>(count));
    choices.place.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t place = next[static_cast<size_t>(step.chosen[i])]++;
        choices.place[static_cast<size_t>(i)] = place;
        choices.token[static_cast<size_t>(place)] = i / step.top_k;
    }
}

// Each chosen expert's rows times its matrix. Experts' panels are shared out alike, so that all threads have
// some of them where there is one token, too.
void PackedExperts::multiply(const Call& call, const PackedProduct& product, const uint8_t* weights,
                             const float* input, const int64_t* order, const Choices& choices,
                             float* output) const {
    const size_t count = choices.experts.size();
    thread_local Scratch scratch;
    thread_local std::vector<PackedProduct::Operands> reused;
    std::vector<PackedProduct::Operands>& groups = reused;
    groups.assign(count, {});
    for (size_t i = 0; i < count; ++i) {
        groups[i].rows = choices.rows[i];
        groups[i].weights = weights + choices.experts[i] * product.weight_bytes();
        groups[i].output = output;
        output += choices.rows[i] * product.width();
    }
    if (count == 0) return;
    product.arrange(call, scratch, input, order, groups.data(), count);
    const int64_t units = product.units();
    const int64_t share = std::min(units, product.share(units * static_cast<int64_t>(count)));
    const auto shares = static_cast<size_t>((units + share - 1) / share);
    call.parallel(count * shares, [&](size_t task) {
        const int64_t begin = static_cast<int64_t>(task % shares) * share;
        product.multiply(groups[task / shares], begin, std::min(units, begin + share));
    });
}

// In the order in which a token chose them, whatever the other tokens chose.
void PackedExperts::add(const Call& call, const Step& step, const Choices& choices,
                        const float* outputs) const {
    const int64_t together =
        std::max<int64_t>(1, kSmallSum / (hidden_size_ * std::max<int64_t>(1, step.top_k)));
    call.parallel(static_cast<size_t>((step.tokens + together - 1) / together), [&](size_t task) {
        const int64_t first = static_cast<int64_t>(task) * together;
        for (int64_t token = first; token < std::min(step.tokens, first + together); ++token) {
            float* sum = step.output + token * hidden_size_;
            std::memset(sum, 0, static_cast<size_t>(hidden_size_) * sizeof(float));
            for (int64_t j = token * step.top_k; j < (token + 1) * step.top_k; ++j) {
                const float* row = outputs + choices.place[static_cast<size_t>(j)] * hidden_size_;
                const float weight = step.weights[j];
                for (int64_t c = 0; c < hidden_size_; ++c) sum[c] += weight * row[c];
            }
            if (step.residual == nullptr) continue;
            const float* residual = step.residual + token * hidden_size_;
            for (int64_t c = 0; c < hidden_size_; ++c) sum[c] += residual[c];
        }
    });
}

}  // namespace kvgraph
