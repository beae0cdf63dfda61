// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "Metrale",
    platforms: [.macOS(.v13), .iOS(.v16)],
    products: [.library(name: "Metrale", targets: ["Metrale"])],
    targets: [
        // The installed C library, found by pkg-config.
        .systemLibrary(name: "CMetrale", pkgConfig: "metrale"),
        .target(name: "Metrale", dependencies: ["CMetrale"]),
        .testTarget(name: "MetraleTests", dependencies: ["Metrale"]),
    ]
)
