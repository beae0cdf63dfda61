// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "chat",
    platforms: [.macOS(.v13)],
    dependencies: [.package(name: "Metrale", path: "../../bindings/swift")],
    targets: [.executableTarget(name: "chat", dependencies: [.product(name: "Metrale", package: "Metrale")])]
)
