// Whom a store without a secret lets in.
#pragma once

namespace tessera::comm {

/// Lets in this user, root and other hosts, see [Note: whose connection]. Whose
/// user cannot be told is let in. Warns of the first of these, and of the first
/// that is refused.
class Admission {
 public:
  /// `socket` is a connection that nothing was read from yet.
  bool admits(int socket);

 private:
  bool has_told_of_unknown_ = false;
  bool has_told_of_others_ = false;
};

} // namespace tessera::comm
