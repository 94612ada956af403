// x W with W in panels of 16 columns: what operators with packed weights have in common. An input is arranged
// as the kernels take it, then threads multiply it with shares of the panels.
#pragma once

#include "kernels.h"
#include "operator.h"

namespace kvgraph {

enum class Rounding { kNone, kBlocks, kToken, kStatic };

class PackedProduct {
  public:
    // The attributes of one product of an operator are told from another's by a prefix of their names.
    PackedProduct(const Attributes& attributes, const std::string& prefix, int64_t in_features,
                  int64_t out_features, Activation gate, Activation activation);

    // Rows that are multiplied with one matrix.
    struct Operands {
        int64_t rows;
        const uint8_t* weights;
        const float* bias;
        const float* residual;
        float* output;
        // What `arrange` sets.
        const float* input;
        Rounded rounded;
        const uint16_t* parts;  // by tile, see SplitProduct; null where floats are multiplied as they are
    };

    // The rows of some groups, one group after another, arranged in `scratch`: row i is row order[i] of the
    // input, or row i where there is no order.
    void arrange(const Call& call, Scratch& scratch, const float* input, const int64_t* order,
                 Operands* groups, size_t count) const;
    // Units begin ... end - 1 of the result, a unit being a panel, or two where one is the gate of the other.
    void multiply(const Operands& operands, int64_t begin, int64_t end) const;

    int64_t width() const { return width_; }  // columns of the result
    int64_t units() const { return (width_ + kPanel - 1) / kPanel; }
    int64_t weight_bytes() const { return units() * unit_bytes(); }
    // Units that one task takes of some matrices of as many units in all.
    int64_t share(int64_t units_in_all) const;

  private:
    struct Tile;
    int64_t unit_bytes() const { return (gate_ == kNone ? 1 : 2) * packing_.panel_bytes(in_features_); }
    bool rounds() const { return rounding_ != Rounding::kNone; }
    bool whole_rows() const { return rounding_ >= Rounding::kToken; }
    bool splits(int64_t rows) const;
    void arrange_floats(Scratch& scratch, const float* input, const int64_t* order, Operands* groups,
                        size_t count) const;
    bool* arrange_integers(Scratch& scratch, Operands* groups, size_t count) const;
    void arrange_tile(const Operands& group, const Tile& tile, const float* input, const int64_t* order,
                      bool* minimum) const;
    void panels(const Operands& operands, int64_t begin, int64_t end) const;
    void split_panels(const Operands& operands, int64_t begin, int64_t end) const;
    void integer_panel(const Operands&, int64_t top, int64_t bottom, const uint8_t* panel, float* tile) const;
    void float_panel(const Operands&, int64_t top, int64_t bottom, const uint8_t* panel, float* tile) const;
    void finish(const Operands& operands, int64_t unit, int64_t top, int64_t bottom, const float* tile,
                const float* up) const;

    int64_t in_features_;
    Packing packing_;
    Rounding rounding_;
    float input_scale_ = 0;
    Activation gate_, activation_;
    int64_t width_;
};

}  // namespace kvgraph
