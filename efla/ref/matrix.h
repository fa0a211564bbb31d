// A small dense float64 matrix with the few operations that the reference needs.
#pragma once

#include <cstdint>
#include <vector>

namespace efla::ref {

struct Matrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<double> data;

  Matrix() = default;
  Matrix(std::int64_t rows, std::int64_t cols) : rows(rows), cols(cols), data(rows * cols, 0.0) {}

  double& operator()(std::int64_t i, std::int64_t j) { return data[i * cols + j]; }
  double operator()(std::int64_t i, std::int64_t j) const { return data[i * cols + j]; }
};

inline Matrix transpose(const Matrix& a) {
  Matrix t(a.cols, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.cols; ++j) t(j, i) = a(i, j);
  }
  return t;
}

inline Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix c(a.rows, b.cols);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t n = 0; n < a.cols; ++n) {
      for (std::int64_t j = 0; j < b.cols; ++j) c(i, j) += a(i, n) * b(n, j);
    }
  }
  return c;
}

inline Matrix operator+(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] += b.data[i];
  return a;
}

inline Matrix operator-(Matrix a, const Matrix& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] -= b.data[i];
  return a;
}

// Returns diag(d) · a.
inline Matrix scale_rows(const std::vector<double>& d, Matrix a) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.cols; ++j) a(i, j) *= d[i];
  }
  return a;
}

// Returns the entries below the diagonal and, if with_diagonal, on the diagonal; zeros elsewhere.
inline Matrix lower_triangle(Matrix a, bool with_diagonal) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = i + (with_diagonal ? 1 : 0); j < a.cols; ++j) a(i, j) = 0.0;
  }
  return a;
}

// Returns (I + l)⁻¹ of a strictly lower triangular l, row by row.
inline Matrix inverse_of_unit_lower(const Matrix& l) {
  Matrix inverse(l.rows, l.rows);
  for (std::int64_t i = 0; i < l.rows; ++i) {
    inverse(i, i) = 1.0;
    for (std::int64_t n = 0; n < i; ++n) {
      for (std::int64_t j = 0; j <= n; ++j) inverse(i, j) -= l(i, n) * inverse(n, j);
    }
  }
  return inverse;
}

}  // namespace efla::ref
